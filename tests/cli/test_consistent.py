"""One name, unit, default and JSON key for one thing, in all commands and in Python."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from pydantic_core import PydanticUndefined
from stored_blocks import chain, damage, fill

from kvconnect.backends.url import parse_size
from kvconnect.cli.commands.generate import _JSON_FIELDS
from kvconnect.cli.main import make_parser
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig, TransferConfig
from kvconnect.engine.options import EngineOptions
from kvconnect.engine.request.output import RequestOutput
from kvconnect.engine.sampling.drafts import NgramSpeculation
from kvconnect.integrations.core.settings import OwnSettings
from kvconnect.integrations.sglang.settings import storage_settings
from kvconnect.integrations.transformers import PromptCache
from kvconnect.integrations.transformers.prompt_cache import _store_config
from kvconnect.integrations.vllm_tier.settings import KvConnectTierSettings
from kvconnect.prometheus import serve
from kvconnect.sampling_params import SamplingParams
from kvconnect.server.route.settings import RouteSettings
from kvconnect.server.settings import PageSettings, ServerSettings
from kvconnect.simulate.first_token import LoadRates
from kvconnect.simulate.machine import Machine
from kvconnect.simulate.workload import Workload

ENTRANCES = (
    *(EngineOptions, KvCacheConfig, KvCacheConnectorConfig, TransferConfig, SamplingParams),
    *(ServerSettings, PageSettings, RouteSettings, OwnSettings, KvConnectTierSettings),
    *(NgramSpeculation, PromptCache, serve, LoadRates, Machine, Workload),
)

NAMED = {
    (KvCacheConfig, "dtype"): "kv_cache_dtype",
    (KvCacheConfig, "max_tokens"): "kv_cache_tokens",
    (KvCacheConfig, "host_cache_size"): "host_cache",
    (KvCacheConfig, "secondary_offload_min_priority"): "offload_min_priority",
    (TransferConfig, "listen"): "transfer_listen",
    (TransferConfig, "advertise"): "transfer_advertise",
    (TransferConfig, "device"): "transfer_device",
    (TransferConfig, "secret"): "transfer_secret",
    (ServerSettings, "max_body_bytes"): "max_body",
    (PageSettings, "max_body_bytes"): "max_body",
    (RouteSettings, "max_body_bytes"): "max_body",
    (ServerSettings, "max_import_bytes"): "max_import",
    (Workload, "max_tokens"): "session_tokens",
    (Workload, "num_requests"): "requests",
    (Workload, "requests_per_s"): "rate",
    (serve, "address"): "metrics_address",
    (serve, "port"): "metrics_port",
}
"""Options of fields whose names are TensorRT-LLM's, or which need no prefix in their class."""

UNLIKE = {
    "dtype": "`make-model` and `bench identity` make a model; the others take it as it is",
    "seed": "samples and checks are random; a file that is written is the same each time",
    "max_batch_size": "`simulate` asks for the effect of memory alone, if it is not given",
    "prefill_tokens_per_s": "a machine in Python has no clock, if it is not given",
    "decode_tokens_per_s": "as above",
    "num_draft_tokens": "a command without --speculative has none, and says the number with it",
    "for_s": "a soak has an end; a pin is kept until it is unpinned, if no time is given",
    "state_interval": "`PromptCache` rounds the default up to whole blocks",
    "tokens_per_block": "`explain` finds blocks of every size, if it is not given",
    "lookup_timeout_ms": "of vLLM's tier, where only the request itself waits",
    "scheduling": "chats of a server that give no max_tokens would run one at a time",
    "role": "a server without one has no transfer; a transfer has one",
    "prefill": "names a rate of a server, and servers of a router",
}
"""Things whose default differs, and why."""

WORKLOAD = {
    *("max_tokens", "parts", "prefix_tokens", "prompt_tokens", "repeats", "requests", "rounds"),
    *("steps", "total"),
}
"""What a benchmark does, which each has a default of its own for."""

SEVERAL = {("bench serve", "served_model_name"), ("bench blocks", "peer_python")}
"""The places that take one of what others take several of, or the other way round."""


def options(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every visible option of every command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for more, chosen in action.choices.items():
                yield from options(chosen, f"{name} {more}".strip())
        elif action.option_strings and action.help != argparse.SUPPRESS:
            yield name, action


ALL = list(options(make_parser()))


def by_name() -> dict[str, list[tuple[str, Any]]]:
    found = defaultdict(list)
    for command, action in ALL:
        found[action.dest].append((command, action))
    return found


def plain(value: object, metavar: object = None) -> object:
    """Returns a default as it may be compared: the absence of a thing is written in many ways."""
    if metavar == "SIZE" and isinstance(value, str):
        return parse_size(value)
    if value in (PydanticUndefined, inspect.Parameter.empty, None, (), [], False):
        return None
    return None if value == 0 and not isinstance(value, bool) and metavar == "SIZE" else value


def default_of(action: Any) -> object:
    value = action.default
    if isinstance(value, str) and action.type is not None:
        value = action.type(value)
    return plain(value, action.metavar)


def kind_of(action: Any) -> tuple[object, ...]:
    text = action.type is None or getattr(action.type, "__name__", "") == "Path"
    kind = "text" if text else action.type.__name__
    return kind, action.metavar, tuple(action.choices or ())


def defaults_of(entrance: Any) -> dict[str, object]:
    if hasattr(entrance, "model_fields"):
        found = {name: field.default for name, field in entrance.model_fields.items()}
    elif is_dataclass(entrance):
        found = {one.name: one.default for one in fields(entrance) if one.init}
    else:
        found = {
            name: one.default
            for name, one in inspect.signature(entrance).parameters.items()
            if name != "self"
        }
    return {NAMED.get((entrance, name), name): value for name, value in found.items()}


def test_an_option_is_the_same_in_every_command():
    for name, uses in by_name().items():
        kinds = {kind_of(action) for _, action in uses}
        assert len(kinds) == 1, (name, kinds)
        shapes = {
            (type(action).__name__, action.nargs)
            for command, action in uses
            if (command, name) not in SEVERAL
        }
        assert len(shapes) <= 1, (name, shapes)


def test_an_option_has_one_default():
    for name, uses in by_name().items():
        found = {
            repr(default_of(action))
            for command, action in uses
            if not (command.startswith("bench ") and name in WORKLOAD)
        }
        assert len(found) <= 1 or name in UNLIKE, (name, found)


def python_names() -> list[Any]:
    commands = by_name()
    counts = defaultdict(int)
    for entrance in ENTRANCES:
        for name in defaults_of(entrance):
            counts[name] += 1
    shared = sorted(name for name, count in counts.items() if count > 1 or name in commands)
    return [name for name in shared if name not in UNLIKE]


@pytest.mark.parametrize("name", python_names())
def test_python_has_the_default_of_the_command(name):
    found = defaultdict(list)
    metavar = None
    for command, action in by_name().get(name, ()):
        if not (command.startswith("bench ") and name in WORKLOAD):
            metavar = action.metavar
            found[default_of(action)].append(command)
    required = (PydanticUndefined, inspect.Parameter.empty)
    for entrance in ENTRANCES:
        value = defaults_of(entrance).get(name, PydanticUndefined)
        if not any(value is one for one in required) and type(value).__name__ != "_MISSING_TYPE":
            found[plain(value, metavar)].append(entrance.__name__)
    assert len(found) <= 1, dict(found)


def test_every_thing_that_differs_is_still_one_of_several():
    commands = by_name()
    known = {name for entrance in ENTRANCES for name in defaults_of(entrance)} | commands.keys()
    assert known >= UNLIKE.keys() | WORKLOAD
    for (entrance, _), option in NAMED.items():
        assert option in defaults_of(entrance)


def test_sglang_waits_as_long_as_the_others():
    class Given:
        extra_config = {"url": "disk:///kv", "interface_v1": 1}  # noqa: RUF012

    given = storage_settings(Given())
    assert given.connector.lookup_timeout_ms == KvCacheConnectorConfig().lookup_timeout_ms


def test_the_prompt_cache_alone_waits_longer():
    """No other request waits for it, and 20 ms would miss what Redis or S3 usually need."""
    for given in ("disk:///kv", {"url": "disk:///kv"}):
        assert _store_config(given).lookup_timeout_ms == 1000
    config = KvCacheConnectorConfig(url="disk:///kv")
    assert _store_config(config).lookup_timeout_ms == 20


# ------------------------------------------------------------------------------------- units


def test_an_options_name_has_no_unit():
    """Its value has it: ``--client-timeout 500ms``, ``--max-body 4MiB``."""
    for _, action in ALL:
        for option in action.option_strings:
            if not option.endswith("-per-s"):
                assert not re.search(r"-(s|ms|seconds|minutes|mib|gib|bytes)$", option), option


def test_what_is_a_time_takes_any_unit():
    words = re.compile(
        r"timeout|(?<!state-)interval|older|unused|first-byte$|^--(for|step|idle|dead)$"
    )
    seen = set()
    for _, action in ALL:
        (option, *_) = action.option_strings[-1:]
        if words.search(option) and action.nargs != 0:
            assert action.metavar == "TIME", option
            seen.add(option)
        if action.metavar == "TIME":
            unit = action.dest.rpartition("_")[2]
            factor = {"s": 1, "ms": 1000}[unit]
            assert action.type("1.5h") == 5400 * factor
            assert action.type("90") == 90 * factor
            assert option in seen
    assert len(seen) >= 12


def test_python_has_one_unit_for_one_time():
    stems = defaultdict(set)
    for entrance in ENTRANCES:
        for name in defaults_of(entrance):
            if found := re.fullmatch(r"(.+)_(s|ms)", name):
                stems[found[1]].add(found[2])
    assert {stem: units for stem, units in stems.items() if len(units) > 1} == {}
    assert stems["lookup_timeout"] == {"ms"}


RENAMED = {
    "--lookup-timeout-ms": "--lookup-timeout",
    "--cache-salt": "--salt",
    "--minutes": "--for",
    "--host": "--host-cache",
    "--device": "--device-cache",
    "--requests": "--limit",
    "--store-first-byte-s": "--store-first-byte",
    "--step-s": "--step",
    "--max-tokens": "--session-tokens",
}


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        (["generate", "m", "--prompt", "x"], ["--lookup-timeout-ms", "35"], ["35ms"]),
        (["generate", "m", "--prompt", "x"], ["--cache-salt", "a"], ["a"]),
        (["serve", "m"], ["--lookup-timeout-ms", "0"], ["0"]),
        (["check", "memory:"], ["--minutes", "1.5"], ["90s"]),
        (["simulate", "t"], ["--host", "2Mtok"], ["2Mtok"]),
        (["simulate", "t"], ["--device", "2Mtok"], ["2Mtok"]),
        (["simulate", "t"], ["--requests", "3"], ["3"]),
        (["simulate", "t"], ["--store-first-byte-s", "0.5"], ["500ms"]),
        (["simulate", "t"], ["--step-s", "0.5"], ["0.5s"]),
        (["make-trace", "t"], ["--max-tokens", "900"], ["900"]),
    ],
)
def test_names_of_earlier_versions_are_accepted_and_not_shown(kvconnect, command, old, new):
    parser = make_parser(command[0])
    assert parser.parse_args([*command, *old]) == parser.parse_args(
        [*command, RENAMED[old[0]], *new]
    )
    shown = kvconnect(command[0], "--help")[1].partition("examples:")[0]
    assert not re.search(rf"{old[0]}(?![\w-])", shown)


# ------------------------------------------------------------------------------------- exit codes

READERS = {
    "ls": ["ls"],
    "stats": ["stats"],
    "top": ["top", "--once"],
    "verify": ["verify"],
    "prune": ["prune", "--older-than", "7d"],
    "copy": ["copy", "memory:"],
    "drop": ["drop", "--all"],
    "export": ["export", "--all", "--output", "/nowhere/prompts.kv"],
    "pin": ["pin", "--all"],
    "unpin": ["unpin", "--all"],
    "prefetch": ["prefetch", "--all"],
}
NAMES = ("--model", "--salt", "--lora", "--group")


@pytest.mark.parametrize("command", [*READERS, "check", "bench store"])
def test_a_store_that_cannot_be_reached_is_exit_code_4(kvconnect, closed_port, command):
    url = f"redis://127.0.0.1:{closed_port}/0?timeout=200ms"
    name, *more = READERS.get(command, command.split())
    as_json = () if command == "check" else ("--json",)
    arguments = (name, *more, url) if name == "bench" else (name, url, *more)
    code, out, err = kvconnect(*arguments, *as_json)
    assert (code, out) == (4, "")
    if as_json:
        error = json.loads(err.splitlines()[-1])["error"]
        assert error["exit_code"] == 4
        assert str(closed_port) in error["message"]


def test_import_into_a_store_that_cannot_be_reached_is_exit_code_4(
    kvconnect, closed_port, url, tmp_path
):
    fill(url, chain("a", 2))
    assert kvconnect("export", url, "--all", "-o", tmp_path / "file")[0] == 0
    target = f"redis://127.0.0.1:{closed_port}/0?timeout=200ms"
    code, out, err = kvconnect("import", target, tmp_path / "file", "--json")
    assert code == 4
    assert json.loads(out)["blocks"] == 0
    assert json.loads(err.splitlines()[-1])["error"]["exit_code"] == 4


@pytest.mark.parametrize("command", ["drop", "export", "pin", "unpin"])
@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_verb_that_finds_nothing_says_so_and_is_exit_code_3(
    kvconnect, url, tmp_path, command, as_json
):
    fill(url, chain("a", 2))
    more = ("--output", tmp_path / "file") * (command == "export")
    code, out, err = kvconnect(command, url, "--salt", "nobody", *more, *as_json)
    assert code == 3
    message = "no pinned block matched" if command == "unpin" else "no block matched"
    if as_json:
        assert json.loads(out)["blocks"] == 0
        error = {"type": "NothingMatched", "exit_code": 3, "message": message}
        assert json.loads(err.splitlines()[-1]) == {"error": error}
    else:
        assert err.splitlines()[-1] == f"kvconnect: error: {message}"


@pytest.mark.parametrize("command", ["ls", "prune", "copy"])
@pytest.mark.parametrize("as_json", [(), ("--json",)])
def test_a_name_that_nothing_has_is_exit_code_3(kvconnect, url, tmp_path, command, as_json):
    fill(url, chain("a", 2))
    arguments = (command, url, f"disk:{tmp_path}/to") if command == "copy" else (command, url)
    code, _, err = kvconnect(*arguments, "--group", 5, *as_json)
    assert code == 3
    if as_json:
        error = {"type": "NothingMatched", "exit_code": 3, "message": "no block matched"}
        assert json.loads(err) == {"error": error}
    else:
        assert err == "kvconnect: error: no block matched\n"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        *(
            ([name, "nowhere", *more], "a scheme is needed")
            for name, *more in (READERS[one] for one in READERS if one != "copy")
        ),
        (["generate", "m", "--prompt", "x", "--store", "dsk:x"], "did you mean 'disk'"),
        (["ls"], "the following arguments are required: URL"),
        (["ls", "disk:x", "--limt", "3"], "did you mean '--limit'"),
        (["lss", "disk:x"], "invalid choice"),
        (["simulate", "t"], "--device-cache: is needed"),
        (["bench", "store", "memory:", "--rounds", "0"], "--rounds 0: must be at least 1"),
    ],
)
def test_with_json_an_error_of_usage_is_json(kvconnect, command, message):
    code, out, err = kvconnect(*command, "--json")
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    error = json.loads(line)["error"]
    assert error.keys() == {"type", "exit_code", "message"}
    assert error["exit_code"] == 2
    assert message in error["message"]


def test_a_password_is_in_no_error_of_json(kvconnect):
    code, out, err = kvconnect("ls", "--json", "redis://u:sesame@h/0", "more")
    assert (code, out) == (2, "")
    assert "sesame" not in err
    assert "more" in json.loads(err)["error"]["message"]


# ------------------------------------------------------------------------------------- JSON keys

KINDS: dict[type, str] = {
    int: "bytes priority num_tokens group blocks sound bad gone deleted deleted_bytes kept "
    "kept_bytes unknown copied skipped tokens missing missing_keys refused resumed present expired "
    "pinned_blocks requests prompt_tokens reused_tokens lost_tokens used_bytes capacity_bytes "
    "pinned_bytes loaded_bytes saved_bytes loads saves lookups misses failures breaker_state",
    float: "created_at used_at pinned_until expires_at elapsed_s bytes_per_s oldest last_used at "
    "load_s save_s ceiling_tokens",
    str: "key parent model namespace salt url problem store engine place",
    bool: "complete dry_run pinned",
}
KEYS = {name: kind for kind, names in KINDS.items() for name in names.split()}
"""The keys of the store's commands: the same thing has the same key in each."""

CONTAINERS = {
    *("bad_blocks", "listed", "by_model", "by_namespace", "by_group", "stores"),
    *("live_requests", "outcomes", "hit_tokens", "device_blocks"),
}


def leaves(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, list):
        for one in value:
            yield from leaves(one)
    elif isinstance(value, dict):
        for name, one in value.items():
            if isinstance(one, dict | list):
                # What a store says of itself has the store's own names.
                named = name not in CONTAINERS and name == "store"
                below = one if not name.startswith("by_") else list(one.values())
                yield from () if named else leaves(below)
                assert name in CONTAINERS | {"store"}, name
            else:
                yield name, one


def test_json_of_the_stores_commands_has_one_key_for_one_thing(kvconnect, url, tmp_path):
    blocks = chain("a", 3)
    fill(url, blocks)
    damage(tmp_path / "kv", blocks[2])
    seen = set()
    for command, code in (
        (["ls", url], 0),
        (["stats", url], 0),
        (["top", url, "--once"], 0),
        (["verify", url], 1),
        (["prune", url, "--to-size", "0", "--dry-run"], 0),
        (["copy", url, f"disk:{tmp_path}/to?capacity=64MiB"], 1),
        (["export", url, "--all", "-o", tmp_path / "file"], 1),
        (["import", f"disk:{tmp_path}/more?capacity=64MiB", tmp_path / "file"], 0),
        (["prefetch", f"tiered:?tiers=disk:{tmp_path}/near,{url}", "--all"], 1),
        (["pin", url, "--all"], 0),
        (["unpin", url, "--all"], 0),
        (["drop", url, "--all"], 0),
    ):
        found, out, err = kvconnect(*command, "--json")
        assert found == code, err
        for line in out.splitlines():
            for name, value in leaves(json.loads(line)):
                assert name in KEYS, (command, name)
                assert value is None or type(value) in {KEYS[name], int}, (command, name, value)
                seen.add(name)
    assert seen == KEYS.keys() - {"salt"} | ({"salt"} & seen)


def test_json_of_answers_has_the_names_of_python():
    known = {one.name for one in fields(RequestOutput)} | set(dir(RequestOutput))
    assert set(_JSON_FIELDS) <= known
