"""copy: the blocks of one store brought to another."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal

import pytest
from stored_blocks import NBYTES, block, chain, damage, entries, fill, frames

from kvconnect.backends.disk.store import DiskBackend
from kvconnect.cli.commands import copy
from kvconnect.operations import frame_reader
from kvconnect.operations.progress import Progress


@pytest.fixture
def source(tmp_path) -> str:
    return f"disk:{tmp_path}/source?capacity=64MiB"


@pytest.fixture
def target(tmp_path) -> str:
    return f"disk:{tmp_path}/target?capacity=64MiB"


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(frame_reader, "_BATCH_NBYTES", 3 * NBYTES)
    monkeypatch.setattr(copy, "_KEYS_PER_LOOKUP", 4)


def test_copy_brings_blocks_with_all_that_is_known_of_them(kvconnect, source, target):
    blocks = [*chain("a", 5, priority=77), *chain("b", 5, model=b"x" * 32, group=0, expires_at=4e9)]
    fill(source, blocks)
    code, out, err = kvconnect("copy", source, target)
    assert (code, err) == (0, "")
    assert out.startswith("copied 10 blocks, 120 KiB, at ")
    assert out.endswith("/s; 0 were there already\n")
    before, after = entries(source), entries(target)
    assert before.keys() == after.keys()
    for key, entry in before.items():
        copied = after[key]
        for name in ("nbytes", "parent", "priority", "namespace", "model", "group", "expires_at"):
            assert getattr(copied, name) == getattr(entry, name)
        assert copied.tokens.tolist() == entry.tokens.tolist()
    assert {one.expires_at for one in after.values()} == {None, 4e9}
    keys = [one.key for one in blocks]
    assert frames(target, keys) == [bytes(one.data.numpy()) for one in blocks]


def test_a_store_is_not_copied_to_itself_nor_its_password_shown(kvconnect):
    url = "redis://me:secret@host"
    code, _, err = kvconnect("copy", url, url)
    assert code == 2
    assert "TARGET redis://me:***@host: is SOURCE" in err


@pytest.mark.usefixtures("small_batches")
def test_interrupted_copy_ends_cleanly_and_goes_on(kvconnect, source, target, monkeypatch):
    fill(source, [one for name in range(5) for one in chain(name, 6)])
    advance = Progress.advance

    def interrupt(self, count):
        advance(self, count)
        if self._task == "copy" and count:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", interrupt)
        code, out, err = kvconnect("copy", source, target)
    assert code == 130
    assert "not complete: the same command goes on" in out
    assert err == ""
    there = entries(target)
    assert 0 < len(there) < 30
    for entry in there.values():  # nothing without its beginning
        assert entry.parent is None or entry.parent in there
    _, out, _ = kvconnect("copy", source, target, "--json")
    found = json.loads(out)
    assert found["skipped"] == len(there)
    assert found["copied"] == 30 - len(there)
    assert entries(target).keys() == entries(source).keys()
    assert kvconnect("copy", source, target, "--group", "2")[1].startswith("copied 0 blocks")


@pytest.mark.usefixtures("small_batches")
def test_blocks_that_were_on_their_way_when_it_was_interrupted_count(
    kvconnect, source, target, monkeypatch
):
    fill(source, chain("a", 9))
    save = DiskBackend.save

    async def interrupted(self, blocks):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)  # Ctrl-C takes effect
        return await save(self, blocks)

    with monkeypatch.context() as patch:
        patch.setattr(DiskBackend, "save", interrupted)
        code, out, _ = kvconnect("copy", source, target, "--json")
    assert code == 130
    found = json.loads(out)
    there = entries(target)
    assert (found["copied"], found["bytes"]) == (len(there), NBYTES * len(there))
    assert len(there) > 0


@pytest.mark.usefixtures("small_batches")
def test_blocks_that_are_there_in_between_are_skipped(kvconnect, source, target):
    blocks = chain("a", 12)
    fill(source, blocks)
    fill(target, [blocks[0], *blocks[3:9], blocks[11]])
    _, out, _ = kvconnect("copy", source, target, "--json")
    found = json.loads(out)
    assert found["copied"] + found["skipped"] >= 12
    assert found["skipped"] >= 5
    keys = [one.key for one in blocks]
    assert frames(target, keys) == [bytes(one.data.numpy()) for one in blocks]


def test_bad_blocks_are_left_behind(kvconnect, source, target, tmp_path):
    blocks = chain("a", 6)
    fill(source, blocks)
    damage(tmp_path / "source", blocks[2])
    code, out, err = kvconnect("copy", source, target)
    assert code == 1
    assert "copied 5 blocks" in out
    assert "1 bad blocks were left behind" in err
    assert entries(target).keys() == {one.key for one in blocks} - {blocks[2].key}
    assert len(entries(source)) == 6


def test_target_that_is_too_small_is_warned_of(kvconnect, source, tmp_path):
    fill(source, chain("a", 40))
    target = f"disk:{tmp_path}/small?capacity={10 * NBYTES}"
    _, _, err = kvconnect("copy", source, target)
    assert "SOURCE holds 480 KiB, TARGET has room for 120 KiB" in err


def test_target_that_takes_no_more_is_an_error(kvconnect, source, target, monkeypatch):
    fill(source, chain("a", 4))

    async def none(self, blocks):
        return 0

    monkeypatch.setattr("kvconnect.backends.disk.store.DiskBackend.save", none)
    code, out, err = kvconnect("copy", source, target)
    assert code == 1
    assert "TARGET takes no more blocks" in err
    assert "not complete" in out


def test_copy_through_memory_and_tiers(kvconnect, source, target, tmp_path):
    fill(source, chain("a", 4))
    assert kvconnect("copy", source, "memory:?capacity=1MiB")[0] == 0
    url = f"tiered:?tiers=memory:?capacity=1MiB,{target}"
    code, out, _ = kvconnect("copy", source, url, "--json")
    assert (code, json.loads(out)["copied"]) == (0, 4)
    assert len(entries(target)) == 4
    back = f"disk:{tmp_path}/back?capacity=1MiB"
    _, out, _ = kvconnect("copy", url, back, "--json")
    assert json.loads(out)["copied"] == 4
    assert entries(back).keys() == entries(source).keys()


@pytest.mark.parametrize("seed", range(3))
def test_parents_come_first_whatever_the_order(seed):
    blocks = [one for name in range(6) for one in chain(name, 5)]
    blocks.append(block("orphan", "absent"))
    random.Random(seed).shuffle(blocks)

    async def listing():
        for one in blocks:
            yield one

    async def order():
        keys = {one.key[: copy._SHORT] for one in blocks}
        return [one.key async for one in copy.parents_first(listing(), keys)]

    ordered = asyncio.run(order())
    at = {key: place for place, key in enumerate(ordered)}
    assert at.keys() == {one.key for one in blocks}
    assert len(ordered) == len(blocks)
    for one in blocks:
        assert one.parent not in at or at[one.parent] < at[one.key]
