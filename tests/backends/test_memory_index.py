"""Blocks in host memory by themselves: their units, while they are read and once they are gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvconnect.backends.host.blocks import HostBlocks
from kvconnect.backends.host.index import MemoryIndex
from kvconnect.backends.host.region import MemoryRegion
from kvconnect.backends.quotas import Quotas
from kvconnect.keys import Namespace


def saved(index, block):
    """The block in memory that `block` became; it takes one unit."""
    reserved = index.reserve(block, 1, index.tick())
    index.publish(reserved)
    return reserved


def test_units_of_a_block_that_is_read_stay_until_that_ends(kit):
    index = MemoryIndex(2)
    keys = kit.keys("held", count=4)
    one, two = (saved(index, kit.block(key)) for key in keys[:2])
    index.hold([one, two])
    assert index.reserve(kit.block(keys[2]), 1, index.tick()) is None
    index.delete(keys[:1])
    assert index.units_used == 2
    index.release([one])
    assert index.units_used == 1
    saved(index, kit.block(keys[2]))
    assert index.units_used == 2
    index.release([two])
    assert index.units_used == 2


def test_a_block_that_is_saved_twice_at_once_is_there_once(kit):
    index, block = MemoryIndex(4), kit.block(kit.key("twice"))
    both = [index.reserve(block, 1, index.tick()) for _ in range(2)]
    for one in both:
        index.publish(one)
    assert (len(index), index.units_used) == (1, 1)


@pytest.mark.parametrize("quotas", [None, Quotas(0.5)])
def test_nothing_is_kept_of_blocks_and_tenants_that_are_gone(kit, quotas):
    index, kept = MemoryIndex(8, quotas), kit.key("kept")
    saved(index, kit.block(kept))
    for number in range(300):
        key = kit.key("gone", number)
        namespace = Namespace(f"tenant {number}").tag()
        saved(index, replace(kit.block(key), namespace=namespace))
        assert sum(map(len, index._leaves.values())) <= 2 * 8 + 64 + 1
        index.delete([key])
    index.delete([kept])
    assert not index._usage
    assert not index._leaves


async def test_units_of_a_save_that_failed_are_free_again(kit, monkeypatch):
    async def fail(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr("kvconnect.backends.host.blocks.copy_all", fail)
    blocks = HostBlocks(MemoryRegion(4 * kit.frame_nbytes, kit.frame_nbytes), None)
    with pytest.raises(RuntimeError, match="planted"):
        await blocks.save(kit.chain(kit.keys("failed", count=2)), ())
    assert (len(blocks), blocks.nbytes) == (0, 0)
