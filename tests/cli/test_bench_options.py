"""``kvconnect bench``: options that mean nothing are refused, each with what is right."""

from __future__ import annotations

import sys

import pytest

NOWHERE = ("--peer-python", "/no/python")
HERE = ("--peer-python", sys.executable)
STORE = (*("store", "memory:?capacity=8MiB", "--sizes", "64KiB", "--total", "1MiB"), "--rounds", 1)


def at_least_one(*options: str) -> list[tuple[tuple[str, int], str]]:
    return [((option, 0), f"{option} 0: must be at least 1") for option in options]


REFUSED = {
    ("blocks",): [
        (NOWHERE, "'/no/python' is no file"),
        (("--tokens", 0), "tokens: 0 must be at least"),
        (("--requests", 0), "requests: 0 must be at least"),
        (("--cached-blocks", 0), "cached_blocks: 0 must be at least"),
        (("--rounds", 0), "rounds: 0 must be at least"),
    ],
    ("dead",): [
        (("--stores", "redis,s4"), "--stores s4: did you mean 's3'?"),
        *at_least_one("--requests", "--prompt-tokens"),
    ],
    ("engine",): [
        (NOWHERE, "'/no/python' is no file"),
        *at_least_one("--requests", "--max-tokens", "--prefill-tokens"),
    ],
    ("engines", *HERE): [
        (NOWHERE, "--peer-python: '/no/python' is no file"),
        (("--connectors", "fz"), "--connectors fz: "),
        *at_least_one("--repeats", "--prompt-tokens"),
    ],
    ("identity",): [
        (("--parts", "canari"), "--parts canari: did you mean 'canary'?"),
        (("--parts", "vllm"), "nothing of what was asked for can be measured"),
        (("--parts", "vllm", *NOWHERE), "--peer-python: '/no/python' is no file"),
        *at_least_one("--repeats"),
    ],
    ("kernels",): [
        (("--total", "0"), "--total=0: must be at least one byte"),
        *at_least_one("--repeats"),
    ],
    ("serve",): [
        (("--url", "http://127.0.0.1:1"), "--url: give --served-model-name, too"),
        (("--workload", "chats", "--write-prompts", "x"), "--write-prompts: is for --workload pre"),
        (("--write-prompts", "/nowhere/x"), "--write-prompts /nowhere/x: No such file"),
        *at_least_one("--concurrency"),
    ],
    STORE: [
        (("--sizes", "5000"), "--sizes 5000: must be multiples of 4096"),
        (("--sizes", "big"), "--sizes=big: a size such as"),
        (NOWHERE, "--peer-python: '/no/python' is no file"),
        *at_least_one("--rounds", "--in-flight"),
    ],
    ("transfer",): [
        (("--parts", "host,lopback"), "--parts lopback: did you mean 'loopback'?"),
        (("--transports", "udp"), "--transports udp: "),
        (("--total", "1MiB", "--piece", "3KiB"), "--piece 3KiB: must be a multiple of 8 bytes"),
        (("--rates", "1,fast"), "--rates 1,fast: give numbers > 0"),
        (("--rates", "0"), "--rates 0: give numbers > 0"),
        (("--idle", "0"), "--idle=0: must be above 0 seconds"),
        *at_least_one("--rounds"),
    ],
}


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        pytest.param(command, *row, id=f"{command[0]} {' '.join(map(str, row[0]))}")
        for command, rows in REFUSED.items()
        for row in rows
    ],
)
def test_a_wrong_option_is_named(kvconnect, command, options, message):
    code, out, err = kvconnect("bench", *command, *options)
    assert (code, out) == (2, "")
    assert message in err
