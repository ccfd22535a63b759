"""``kvconnect schemes`` and ``kvconnect completion``."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from kvconnect.backends.registry import schemes
from kvconnect.cli.main import COMMANDS


def test_every_scheme_is_listed_with_what_it_is(kvconnect):
    code, out, _ = kvconnect("schemes")
    assert code == 0
    lines = dict(line.split(":", 1) for line in out.splitlines())
    assert tuple(sorted(lines)) == schemes()
    assert all(about.strip() for about in lines.values())


def test_a_scheme_that_lacks_a_package_says_what_to_install(kvconnect, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvconnect.backends.s3", None)
    code, out, _ = kvconnect("schemes", "--json")
    assert code == 0
    found = {one["scheme"]: one for one in map(json.loads, out.splitlines())}
    assert found.keys() == set(schemes())
    assert "pip install '.[s3]'" in found["s3"]["missing"]
    assert found["disk"]["missing"] is None
    assert found["disk"]["module"].startswith("kvconnect.backends.disk")


@pytest.fixture
def complete(kvconnect):
    """Completes the last of some words in bash."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not on PATH: its completion was not tried")
    _, script, _ = kvconnect("completion", "bash")

    def completed(*words: str) -> set[str]:
        line = " ".join(f"'{word}'" for word in ("kvconnect", *words))
        asked = f"COMP_WORDS=({line}); COMP_CWORD={len(words)}; _kvconnect\n"
        shown = 'printf "%s\\n" "${COMPREPLY[@]}"\n'
        done = subprocess.run(
            [bash, "--norc", "-c", script + asked + shown],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        return set(done.stdout.split())

    return completed


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("ma",), {"make-model", "make-trace"}),
        (("serve", "--max-b"), {"--max-batch-size", "--max-body"}),
        (("serve", "m", "--transport", ""), {"tcp", "nixl"}),
        (("-v", "ls", "disk:x", "--sort", "p"), {"priority"}),
        (("bench", "st"), {"store"}),
        (("bench", "store", "--rou"), {"--rounds"}),
        (("generate", "--lookup"), {"--lookup-timeout"}),
        (("prune", "--rou"), set()),
        (("completion", "b"), {"bash"}),
        (("generate", "some"), set()),
    ],
)
def test_bash_completes(complete, words, found):
    assert complete(*words) == found


def test_bash_completes_every_command(complete):
    assert complete("") >= set(COMMANDS)


def test_zsh_gets_the_same(kvconnect):
    code, out, _ = kvconnect("completion", "zsh")
    assert code == 0
    first, rest = out.split("\n", 1)
    assert "bashcompinit" in first
    assert rest == kvconnect("completion", "bash")[1]
