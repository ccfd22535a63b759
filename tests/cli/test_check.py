"""``kvconnect check``: table, seed and exit code."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from kvconnect.backends import registry
from kvconnect.backends.memory.store import MemoryBackend


def test_table_and_success(kvconnect, tmp_path):
    code, out, _ = kvconnect("check", f"disk://{tmp_path}/kv", "--only", "integrity", "--seed", 4)
    assert code == 0
    assert out.startswith("seed 4\n")
    line = r"^passed +integrity\.swapped +\d+\.\d\d s  \S+"
    assert re.search(line, out, re.MULTILINE)
    assert out.rstrip().endswith("11 passed, 0 failed, 0 skipped (seed 4)")
    assert not (tmp_path / "kv" / "kvconnect-check").exists()


def test_a_failed_check_is_exit_code_1(kvconnect, monkeypatch):
    async def load(self, keys, into):
        return 0

    monkeypatch.setattr(MemoryBackend, "load", load)
    code, out, _ = kvconnect("check", "memory:", "--only", "contract.delete")
    assert code == 1
    assert "failed  contract.delete" in out


def test_a_seed_is_chosen_and_printed(kvconnect):
    _, out, _ = kvconnect("check", "memory:", "--only", "contract.empty_batch")
    assert re.match(r"seed \d+\n", out)


@pytest.fixture
def bounded_files(monkeypatch):
    """A scheme ``files:`` of a store of another's own, which is bounded."""

    def from_url(url):
        return MemoryBackend(url.size("capacity") or 64 << 20)

    monkeypatch.setitem(registry._BUILT_IN, "files", f"{__name__}:from_url")
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(from_url=from_url))


def test_with_a_small_store_what_it_drops_is_checked(kvconnect, bounded_files):
    asked = ("check", "files:/x", "--only", "eviction")
    code, out, _ = kvconnect(*asked)
    assert (code, out.count("--small URL is not given")) == (0, 3)
    code, out, _ = kvconnect(*asked, "--small", "files:/y?capacity={capacity}")
    assert (code, out.count("passed  ")) == (0, 3)


@pytest.mark.usefixtures("bounded_files")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["memory:", "--only", "kyes"], "did you mean 'keys'"),
        (["memoy:"], "did you mean 'memory'"),
        (["memory:?capactiy=1GiB"], "did you mean 'capacity'"),
        (["memory:", "--small", "memory:"], "makes small stores of this kind itself"),
        (["files:/x", "--small", "files:/y"], "write {capacity} where its size"),
        (["files:/x", "--small", "memory:?capactiy={capacity}"], "did you mean 'capacity'"),
        (["memory:", "--soak", "--minutes", "0"], "must be above 0 seconds"),
        (["memory:", "--tensor-parallel-size", "0"], "--tensor-parallel-size 0: must be at least"),
    ],
)
def test_wrong_usage_is_exit_code_2(kvconnect, arguments, message):
    code, _, err = kvconnect("check", *arguments)
    assert code == 2
    assert message in err


def test_a_store_that_holds_blocks_is_refused_unless_forced(kvconnect, monkeypatch):
    async def stats(self):
        return {"blocks": 3, "bytes": 0, "capacity": 1}

    monkeypatch.setattr(MemoryBackend, "stats", stats)
    code, _, err = kvconnect("check", "memory:", "--only", "contract.empty_batch")
    assert code == 2
    assert "holds 3 blocks" in err
    code, _, _ = kvconnect("check", "memory:", "--only", "contract.empty_batch", "--force")
    assert code == 0


def test_soak_prints_its_seed_and_what_it_did(kvconnect):
    code, out, _ = kvconnect("check", "memory:", "--soak", "--minutes", "0.01", "--seed", 6)
    assert code == 0
    assert re.search(r"^soak: \d+ rounds in \d+ s, seed 6: ", out, re.MULTILINE)
