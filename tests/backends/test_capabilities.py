"""What a backend says of itself: in one place, believed as long as it is about its own methods."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tier_store import DictTier

from kvconnect import frame
from kvconnect.backend import Capabilities
from kvconnect.backends import GuardedBackend
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.backends.tiered.settings import TieredSettings
from kvconnect.backends.tiered.store import TieredBackend


class Loads:
    """Beside a store, before it in the order of resolution."""

    async def load(self, keys, into):
        return await super().load(keys, into)


class Checked(MemoryBackend):
    capabilities = replace(MemoryBackend.capabilities, checks_frames=True)


@pytest.mark.parametrize("bases", [(Checked,), (Loads, Checked)])
def test_who_overrides_load_is_not_believed_what_the_store_said_of_its_own(bases):
    own = {} if len(bases) == 2 else {"load": Loads.load}
    for said in ({}, {"capabilities": Checked.capabilities}):
        mine = type("Mine", bases, own | said)
        can = replace(Checked.capabilities, checks_frames=False, hashes_loads=False)
        assert mine.capabilities == can
        assert type("Next", (mine,), {}).capabilities == can


def test_who_overrides_save_is_not_believed_what_the_store_said_of_its_own():
    mine = type("Mine", (Checked,), {"save": lambda self, blocks: None})
    assert mine.capabilities == replace(Checked.capabilities, seals_saves=False)


def test_who_overrides_both_ways_is_believed():
    both = {"load": Loads.load, "load_hashed": MemoryBackend.load_hashed}
    assert type("Mine", (Checked,), both).capabilities == Checked.capabilities


def test_around_a_store_nothing_is_promised_of_what_passes_through(kit):
    can = GuardedBackend(Checked()).capabilities
    assert can == MemoryBackend.capabilities.wrapped()
    assert can == Capabilities(
        enumerable=True, expires_each=True, inline=True, pins=True, variable_length=True
    )


async def test_checksums_are_of_no_concern_to_a_store_of_four_methods(kit):
    store = DictTier()
    key = kit.key("plain")
    block = kit.block(key)
    layout = kit.layout
    header = frame.FrameHeader(16, layout.block_nbytes, layout.fingerprint(), key)
    assert await store.save_sealed([block], [frame.address(block.data, header)]) == 1
    (into,) = kit.buffers(1)
    taken = frame.FrameChecksum(into)
    assert await store.load_hashed([key], [into], [taken]) == 1
    frame.check(into, key, None, taken)


async def test_a_disk_hashes_blocks_where_it_reads_them(make_disk, kit):
    layout, keys = kit.layout, kit.keys("hashed", count=6)
    blocks = kit.chain(keys)
    headers = [frame.FrameHeader(16, layout.block_nbytes, layout.fingerprint(), k) for k in keys]
    async with kit.opened(make_disk()) as store:
        sealing = [frame.address(one.data, of) for one, of in zip(blocks, headers, strict=True)]
        assert await store.save_sealed(blocks, sealing) == 6
        into = kit.buffers(6)
        unaligned = torch.empty(into[5].numel() + 1, dtype=torch.uint8)[1:]
        into = [*into[:5], unaligned]
        taken = [frame.FrameChecksum(buffer) for buffer in into]
        assert await store.load_hashed(keys, into, taken) == 6
    assert [one.left_nbytes for one in taken] == [0] * 6
    for buffer, key, one in zip(into, keys, taken, strict=True):
        frame.check(buffer, key, None, one)


async def test_what_tiers_that_are_looked_at_do_not_check_is_checked_around_them(kit):
    tier = DictTier()
    keys = kit.keys("looked at", count=2)
    async with kit.opened(GuardedBackend(tier)) as whole:
        await whole.save(kit.chain(keys))
    tier.blocks[keys[1]].data[1000] ^= 1
    tiers = TieredBackend([MemoryBackend(1 << 20), tier], TieredSettings(patience_s=60.0))
    async with kit.opened(GuardedBackend(tiers), "read") as store:
        assert await store.load(keys, kit.buffers(2)) == 1
        assert list(store.parts()) == ["memory", "dicttier"]
        assert not len(tiers.tiers[0].backlog)
        assert (await store.parts()["memory"].stats())["blocks"] == 0
    assert store.parts() == {}


async def test_each_call_to_a_tier_takes_half_of_what_one_to_the_whole_may():
    tiers = TieredBackend([DictTier(), DictTier()], TieredSettings(deadline_s=3.0))
    for seconds in (30.0, 4.0):
        await GuardedBackend(tiers, deadline_s=seconds).open([])
        assert {tier.guard.inner.deadline_s for tier in tiers.tiers} == {min(3.0, seconds / 2)}
    await tiers.close()


def test_a_store_that_holds_its_frames_has_no_parts():
    assert GuardedBackend(MemoryBackend()).parts() == {}
