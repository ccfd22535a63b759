"""``kvconnect bench engines``: what it refuses, asks its engines for, and makes of the answers."""

from __future__ import annotations

import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvconnect.bench.restart import forget_files
from kvconnect.cli.main import main
from kvconnect_bench.blocks.party import PartyFailed
from kvconnect_bench.engines import run
from kvconnect_bench.peers import vllm_connectors
from kvconnect_bench.peers.vllm_connectors import Clock, Watch, connector_config

STEP_S = 0.01
INSIDE_S = 20e-6
TIER_S = 5e-6
SPENT = {"wall": 5.1e-3, "admission": 64e-6, "rest": 36e-6}


class EngineHere:
    """Stands in for vLLM's process: what was computed once takes a tenth of the time.

    `stored` is what its directories hold: prompts by connector.
    """

    stored: dict[str, set[tuple[int, ...]]]

    def __init__(self, *_: object) -> None:
        self.name = ""
        self.seen: set[tuple[int, ...]] = set()

    def ask(self, workload: str, **what):
        return getattr(self, workload)(**what)

    def start(self, model: str, connector: str, directory: str, longest: int) -> float:
        if connector == "LMCache":
            raise PartyFailed("No module named 'lmcache'")
        self.name = connector
        return 1.0

    def answer(self, prompt: list[int], max_tokens: int) -> dict:
        key = tuple(prompt)
        stored = self.stored.setdefault(self.name, set())
        found = key in self.seen or (self.name != "none" and key in stored)
        self.seen.add(key)
        stored.add(key)
        lies = self.name == "ExampleConnector" and found
        return {
            "first": 0.1 if found else 1.0,
            "connector": SPENT,
            "tier": {name: value / 2 for name, value in SPENT.items()},
            "cached": len(prompt) - 1 if found else 0,
            "tokens": [sum(prompt) % 97 + lies] * max_tokens,
            "steps": [(STEP_S, INSIDE_S, TIER_S, 0.0)] * max_tokens,
        }

    def settle(self) -> None:
        """Nothing waits."""

    def stop(self) -> float:
        return 0.0

    def close(self) -> None:
        """No process."""

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        """No process."""


@pytest.fixture
def here(monkeypatch) -> None:
    monkeypatch.setattr(EngineHere, "stored", {}, raising=False)
    monkeypatch.setattr(run, "Party", EngineHere)


def test_each_connector_is_measured_cold_idle_and_restored(here, bench, llama, tmp_path):
    figures, _ = bench(
        *("engines", "--peer-python", sys.executable, "--model", llama, "--directory", tmp_path),
        *("--prompt-tokens", 64, "--steps", 5, "--repeats", 2),
    )
    found = {name: one["value"] for name, one in figures.items()}
    assert found["none: decode step"] == pytest.approx(10)
    for name in ("KvConnect", "KvConnectTier", "fs", "ExampleConnector"):
        # Of a tier its own part is told apart from vLLM's.
        is_tier = name in {"KvConnectTier", "fs"}
        assert found[f"{name}: of it in the scheduler"] == pytest.approx(5 if is_tier else 20)
        around = found.get(f"{name}: and in vLLM's offloading around it")
        assert around == (pytest.approx(15) if is_tier else None)
        part = 0.5 if is_tier else 1
        admission = found[f"{name}: admission of a new prompt, for each block"]
        assert admission == pytest.approx(32 * part)
        assert found[f"{name}: ordering its saves, for each block"] == pytest.approx(18 * part)
        assert found[f"{name}: waiting meanwhile"] == pytest.approx(5 * part)
        assert found[f"{name}: tokens found after a restart"] == 63
        assert found[f"{name}: computed / restored"] == pytest.approx(10)
        floor = sum(value for key, value in found.items() if key.startswith("floor"))
        assert found[f"{name}: restored / floor"] == pytest.approx(100 / floor)
    assert found["ExampleConnector: wrong answers"] == 2
    assert found["KvConnect: wrong answers"] == 0


def test_what_cannot_start_is_left_out_and_says_why(here, capsys, llama, tmp_path):
    options = ("--connectors", "LMCache,fs", "--model", str(llama), "--directory", str(tmp_path))
    command = ("bench", "engines", "--peer-python", sys.executable, "--prompt-tokens", "64")
    assert main([*command, *options]) == 0
    shown = capsys.readouterr()
    assert "LMCache: is left out: No module named 'lmcache'" in shown.err
    assert "LMCache" not in shown.out
    assert "fs: restored / floor" in shown.out


def test_if_nothing_starts_that_is_an_error(here, capsys, llama, tmp_path):
    options = ("--connectors", "LMCache", "--model", str(llama), "--directory", str(tmp_path))
    assert main(["bench", "engines", "--peer-python", sys.executable, *options]) != 0
    assert "--connectors LMCache: none of them starts" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["KvConnect", "ExampleConnector"])
def test_a_connector_is_configured_with_its_directory(name, tmp_path):
    config = connector_config(name, tmp_path)
    assert config is not None
    assert config["kv_connector"] == name
    assert str(tmp_path) in str(config["kv_connector_extra_config"])
    assert connector_config("none", tmp_path) is None


def test_time_is_taken_from_the_outermost_call_and_properties_are_left_alone():
    class Connector:
        calls = 0

        @property
        def worker(self) -> None:
            raise RuntimeError("not here")

        def on_new_request(self) -> int:
            return self.inner() + 1

        def inner(self) -> int:
            self.calls += sum(range(10_000)) > 0
            return 1

        def wait(self) -> None:
            threading.Event().wait(0.01)

    connector = Connector()
    clock = Clock(connector)
    assert connector.on_new_request() == 2
    assert connector.calls == 1
    admitted = clock.spent
    assert 0 < admitted.admission <= admitted.wall
    assert admitted.rest == 0
    connector.wait()
    waited = clock.spent - admitted
    # What is waited for is none of the processor's time.
    assert waited.admission == 0
    assert waited.rest < 0.009 < waited.wall


def test_what_the_clock_itself_costs_is_taken_off(monkeypatch):
    class Connector:
        def lookup(self) -> None:
            pass

    monkeypatch.setattr(vllm_connectors.time, "thread_time", iter((0.0, 3.0, 5.0, 9.0)).__next__)
    connector = Connector()
    clock = Clock(connector, 2.0)
    connector.lookup()
    connector.lookup()
    assert clock.spent.admission == (3 - 0 - 2) + (9 - 5 - 2)


def test_the_time_of_looks_at_the_weights_is_taken_and_they_can_be_left_out(monkeypatch):
    class Looks:
        count = 0

        def changed(self) -> str | None:
            self.count += 1
            return "a weight was replaced"

    monkeypatch.setattr(vllm_connectors, "_LOOKS", ((__name__, "Looks"),))
    monkeypatch.setattr(vllm_connectors, "import_module", lambda _: SimpleNamespace(Looks=Looks))
    watch, looks = Watch(), Looks()
    assert looks.changed() == "a weight was replaced"
    spent = watch.spent
    assert spent > 0
    watch.is_on = False
    assert looks.changed() is None
    assert (looks.count, watch.spent) == (1, spent)


def test_looks_are_taken_where_the_connectors_take_them():
    for module, name in vllm_connectors._LOOKS:
        assert callable(getattr(import_module(module), name).changed)


def test_the_page_cache_gives_up_what_it_has_of_files(tmp_path):
    file = tmp_path / "deep" / "file"
    file.parent.mkdir()
    file.write_bytes(bytes(1 << 20))
    assert is_cached(file)
    forget_files(tmp_path)
    assert not is_cached(file)


def is_cached(path: Path) -> bool:
    """Whether the first page of a file can be read without its disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(descriptor, [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError as error:
        pytest.skip(f"this filesystem does not say: {error}")
    finally:
        os.close(descriptor)
