"""bench store: figures of a store beside those of the machine."""

from __future__ import annotations

import errno
import json
import sys

import pytest
from stored_blocks import chain, entries, fill

from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.bench.report import median_ratio
from kvconnect.bench.store.floor import fastest
from kvconnect.bench.store.payloads import Payloads
from kvconnect.bench.store.report import StoreFigure, percentile, render
from kvconnect.cli.main import main
from kvconnect.connector.io.access import LOADS_IN_FLIGHT, SAVES_IN_FLIGHT
from kvconnect.errors import BadFrame
from kvconnect.frame import check

SMALL = ("--sizes", "64KiB,256KiB", "--total", "2MiB", "--rounds", "1")


@pytest.mark.parametrize(
    ("url", "floors"),
    [
        ("memory:?capacity=8MiB", {"memcpy", "memcpy + checksum", "dict"}),
        ("disk:{tmp}/kv?capacity=32MiB", {"O_DIRECT slots", "one query"}),
        ("tiered:?tiers=memory:?capacity=4MiB,disk:{tmp}/kv?capacity=32MiB&patience=60s", {""}),
    ],
)
def test_each_figure_stands_beside_its_floor(kvconnect, tmp_path, url, floors):
    code, out, err = kvconnect("bench", "store", url.format(tmp=tmp_path), *SMALL, "--json")
    assert code == 0
    assert "no floor" in err or floors != {""}
    figures = json.loads(out)["figures"]
    hashed = [one for one in figures if one["how"] == "floor, hashed"]
    assert len(hashed) == 4 * ("one query" in floors)  # there the pass hides, or it should
    assert all(one["ratio"] for one in hashed)
    figures = [one for one in figures if one not in hashed]
    asked = {(one["operation"], one["how"], one["value_nbytes"]) for one in figures}
    assert asked == {
        (what, how, size)
        for what in ("put", "get", "lookup")
        for how in ("bare", "guarded")
        for size in (64 << 10, 256 << 10)
    }
    assert {one["floor_name"] for one in figures} == floors
    for one in figures:
        assert one["rate"] > 0
        assert 0 < one["p50_ms"] <= one["p99_ms"]
        if floors == {""}:
            assert one["ratio"] is None
        else:
            # Of one round, so exactly these two.
            assert one["ratio"] == pytest.approx(one["rate"] / one["floor"])


def test_the_help_says_how_many_calls_the_connector_makes(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "store", "--help"])
    said = f"{SAVES_IN_FLIGHT} to store and {LOADS_IN_FLIGHT} to load"
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_store_in_use_keeps_its_blocks_and_nothing_else(kvconnect, tmp_path):
    url = f"disk:{tmp_path}/kv?capacity=32MiB"
    blocks = chain("a", 5)
    fill(url, blocks)
    assert kvconnect("bench", "store", url, *SMALL)[0] == 0
    assert entries(url).keys() == {one.key for one in blocks}
    assert not [path for path in (tmp_path / "kv").iterdir() if path.name.startswith("bench-")]


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("memory:?capacity=1MiB", "memory:?capacity=1MiB: "),
        ("disk:{tmp}/kv?capacity=1MiB", "{tmp}/kv?capacity=1MiB: "),
    ],
)
def test_a_store_without_room_is_an_error_that_says_what_is_needed(kvconnect, tmp_path, url, named):
    code, out, err = kvconnect("bench", "store", url.format(tmp=tmp_path), *SMALL)
    assert (code, out) == (2, "")
    (sentence,) = [line for line in err.splitlines() if line.startswith("kvconnect: error: ")]
    assert named.format(tmp=tmp_path) in sentence
    assert "needs room for 2097152 bytes" in sentence
    assert "give the store more capacity, or measure with a smaller --total" in sentence


def test_a_store_that_others_fill_meanwhile_is_the_same_error(kvconnect, monkeypatch):
    save = MemoryBackend.save

    async def press(self, blocks):
        stored = await save(self, blocks)
        await self.delete([blocks[0].key])
        return stored

    monkeypatch.setattr(MemoryBackend, "save", press)
    code, _, err = kvconnect("bench", "store", "memory:?capacity=8MiB", *SMALL)
    assert code == 2
    assert "values of a call were loaded" in err
    assert "no other process may fill it meanwhile" in err


def test_a_disk_without_space_for_the_floor_is_an_error_that_leaves_nothing(
    kvconnect, tmp_path, monkeypatch
):
    def full(fd, offset, nbytes):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvconnect_bench.store.floor_disk.os.posix_fallocate", full)
    code, _, err = kvconnect("bench", "store", f"disk:{tmp_path}/kv?capacity=32MiB", *SMALL)
    assert code == 2
    assert f"{tmp_path}/kv: no space for the 2097152 bytes" in err
    assert not list((tmp_path / "kv").glob("bench-*"))


def test_a_store_that_gives_other_bytes_is_no_figure(kvconnect, monkeypatch):
    async def lie(self, keys, into):
        return len(keys)

    monkeypatch.setattr(MemoryBackend, "load", lie)
    code, _, err = kvconnect("bench", "store", "memory:?capacity=8MiB", *SMALL)
    assert code == 1
    assert "came back with other bytes" in err


def test_a_peer_that_is_not_there_is_left_out_with_a_sentence(kvconnect):
    url = "memory:?capacity=8MiB"
    code, out, err = kvconnect("bench", "store", url, *SMALL, "--peer-python", sys.executable)
    assert code == 0
    assert "LMCache is left out at 0.0625 MiB (" in err
    assert "lmcache" in err
    assert "guarded" in out


def test_payloads_are_sound_frames_of_exactly_that_size():
    payloads = Payloads(64 << 10, 4)
    for block in payloads.blocks:
        assert block.data.numel() == 64 << 10
        assert block.data.data_ptr() % 4096 == 0
        check(block.data, block.key, {payloads.layout.fingerprint()})
    with pytest.raises(BadFrame):
        payloads.check()


def test_percentiles_are_values_that_were_measured():
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 99)) == (50.0, 99.0)
    assert percentile([3.0], 99) == 3.0


def test_the_floor_is_one_way_in_all_rounds_not_the_luckiest_of_each():
    assert fastest([[2.0, 3.0], [2.0, 1.0], [2.0, 3.0]]) == [2.0, 2.0, 2.0]
    assert fastest([[1.0]]) == [1.0]


def test_a_ratio_is_of_one_round():
    # The second round was disturbed; so was its floor.
    assert median_ratio([9.0, 1.0, 9.0], [10.0, 1.0, 10.0]) == 0.9


def test_the_table_shows_what_there_is():
    figures = [
        StoreFigure("disk", "put", "bare", 2 << 20, 2e9, 1.0, 2.0, 4e9, "O_DIRECT slots", 0.5),
        StoreFigure("disk", "lookup", "LMCache", 2 << 20, 5e6),
    ]
    lines = render("store", figures).splitlines()
    assert lines[2].split() == (
        [
            "2",
            "MiB",
            "put",
            "bare",
            "2.00",
            "GB/s",
            "1.000",
            "2.000",
            "4.00",
            "GB/s",
            "0.50",
            "O_DIRECT",
            "slots",
        ]
    )
    assert lines[3].split() == ["lookup", "LMCache", "5,000k", "keys/s"]
