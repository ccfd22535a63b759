"""Several stores as one, when some of them hang, lie, die and come back."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial

import pytest
import tier_store
import torch
from tier_store import DictTier, until

from kvconnect import frame
from kvconnect.backends import open_backend
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.tiered import tier as tiered_tier
from kvconnect.backends.tiered.settings import TieredSettings
from kvconnect.backends.tiered.store import TieredBackend
from kvconnect.errors import BackendTimeout, BackendUnavailable, ConfigurationError
from kvconnect.frame import FrameHeader
from kvconnect.testing.faults.faulty_backend import FaultyBackend
from kvconnect.trace import metrics

PATIENCE_S = 0.2
tiered = partial(tier_store.tiered, patience_s=PATIENCE_S, deadline_s=0.5)


@pytest.fixture(autouse=True)
def _quick_probes(monkeypatch):
    monkeypatch.setattr(tiered_tier, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(tiered_tier, "_LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(tiered_tier, "_PROBE_S", 0.2)


def sealed(kit, key, **changes):
    """A sound frame of `key`."""
    block = replace(kit.block(key), **changes)
    layout = kit.layout
    header = FrameHeader(16, layout.block_nbytes, layout.fingerprint(), key)
    frame.seal(block.data, header)
    return block


# ------------------------------------------------------------------------------------ hanging


async def test_lookup_waits_for_a_hanging_tier_once_and_then_not_at_all(kit):
    one, two = DictTier(), DictTier()
    keys = kit.keys("hang", count=4)
    one.put(*kit.chain(keys)[:2])
    two.put(*kit.chain(keys))
    async with tiered(one, two, deadline_s=60.0) as store:
        two.hang.add("lookup")
        start = time.monotonic()
        assert await store.lookup(keys) == 2
        assert PATIENCE_S <= time.monotonic() - start < 30
        asked = two.calls["lookup"]
        start = time.monotonic()
        for _ in range(200):
            assert await store.lookup(keys) == 2
        assert time.monotonic() - start < 180 * PATIENCE_S  # not two hundred times
        assert two.calls["lookup"] <= asked + 10  # by probes, not by requests
        two.recover()
        await until(lambda: store.tiers[1].prompt)
        assert await store.lookup(keys) == 4


async def test_lookup_does_not_wait_at_all_if_a_tier_that_answers_has_everything(kit):
    one, two = DictTier(), DictTier()
    keys = kit.keys("all", count=4)
    one.put(*kit.chain(keys))
    async with tiered(one, two, patience_s=30.0) as store:
        two.hang.add("lookup")
        start = time.monotonic()
        for _ in range(100):
            assert await store.lookup(keys) == 4
        assert time.monotonic() - start < 25  # one that waited took 30
        # Questions that nobody waits for do not pile up either.
        assert two.calls["lookup"] <= 40


def shown():
    return {(gauge.name, gauge.labels) for gauge in metrics.gauges()}


async def test_open_that_is_given_up_leaves_no_tier_open():
    before = shown()
    one, two = DictTier(), DictTier()
    two.hang.add("open")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await TieredBackend([one, two]).open([])
    await until(lambda: one.calls["close"] and not one.is_open)
    assert shown() <= before


async def test_a_tier_that_hangs_is_given_up_in_time_for_the_others(kit):
    one, two = DictTier(), DictTier()
    two.hang.add("open")
    key = kit.key("given up")
    async with kit.opened(open_backend(TieredBackend([one, two]), deadline_s=0.8)) as store:
        assert await store.save([sealed(kit, key)]) == 1
        assert await store.lookup([key]) == 1
        two.recover()


async def test_load_given_up_before_its_tier_is_keeps_the_buffers_until_the_tier_ends(kit):
    tier = DictTier()
    key = kit.key("held")
    tier.put(kit.block(key))
    tier.hang.add("load")
    whole = TieredBackend([tier], TieredSettings(deadline_s=0.2, verify_frames=False))
    async with kit.opened(GuardedBackend(whole, deadline_s=0.1)) as store:
        (into,) = kit.buffers(1)
        with pytest.raises(BackendTimeout) as late:
            await store.load([key], [into])
        await until(lambda: not whole.tiers[0].alive)  # the tier was given up, too
        await asyncio.sleep(0.01)  # nothing tells that `pending` stays as it is
        assert not late.value.pending.done()
        assert kit.untouched(into)
        tier.recover()
        await until(late.value.pending.done)
        assert not kit.untouched(into)


async def test_save_that_one_tier_refuses_keeps_the_data_that_another_has(kit):
    class Misconfigured(DictTier):
        async def save(self, blocks):
            raise ConfigurationError("no such bucket")

    refusing, hanging = Misconfigured(), DictTier()
    async with tiered(refusing, hanging) as store:
        hanging.hang |= {"save", "lookup"}
        with pytest.raises(BackendTimeout) as late:
            await store.save([kit.block(kit.key("both"))])
        assert not late.value.pending.done()
        hanging.recover()
        await until(late.value.pending.done)


async def test_copy_to_a_faster_tier_that_fails_hides_no_buffer_that_is_still_used(kit):
    class Babbling(DictTier):
        async def describe(self, keys):
            return ["nonsense"] * len(keys)

    faster, slower, slowest = DictTier(), Babbling(), DictTier()
    keys = kit.keys("promoted", count=2)
    slower.put(kit.block(keys[0]))
    slowest.put(*(kit.block(key) for key in keys))
    async with tiered(faster, slower, slowest) as store:
        slowest.hang |= {"load", "lookup"}
        into = kit.buffers(2)
        with pytest.raises(BackendTimeout) as late:
            await store.load(keys, into)
        assert not late.value.pending.done()
        slowest.recover()
        await until(late.value.pending.done)
        assert await store.load(keys[:1], into[:1]) == 1


async def test_tier_that_hung_in_a_load_is_skipped_by_the_next_until_it_answers(kit):
    one, two, three = DictTier(), DictTier(), DictTier()
    keys = kit.keys("skipped", count=3)
    two.put(*kit.chain(keys))
    three.put(*kit.chain(keys))
    async with tiered(one, two, three, promote=False) as store:
        two.hang |= {"load", "lookup"}
        with pytest.raises(BackendTimeout):
            await store.load(keys, kit.buffers(3))
        assert not store.tiers[1].alive
        into = kit.buffers(3)
        assert await store.load(keys, into) == 3
        assert all(kit.holds(b, key) for b, key in zip(into, keys, strict=True))
        assert three.loads == keys
        two.recover()
        await until(lambda: store.tiers[1].alive)
        assert await store.load(keys, kit.buffers(3)) == 3
        assert two.loads[-3:] == keys


async def test_load_prefers_a_tier_that_answers_to_a_faster_one_that_does_not(kit):
    one, two = DictTier(), DictTier()
    keys = kit.keys("prefer", count=2)
    one.put(*kit.chain(keys))
    two.put(*kit.chain(keys))
    async with tiered(one, two, deadline_s=5.0) as store:
        one.hang |= {"lookup", "load"}
        assert await store.lookup(keys) == 2
        store.tiers[0].note_slow()  # as a lookup that only this tier could answer has it
        assert await store.load(keys, kit.buffers(2)) == 2
        assert two.loads == keys


async def test_save_to_a_hanging_tier_keeps_the_data_until_it_ends(kit):
    one, two = DictTier(), DictTier()
    async with tiered(one, two) as store:
        two.hang |= {"save", "lookup"}
        with pytest.raises(BackendTimeout) as late:
            await store.save([kit.block(kit.key("slow"))])
        assert not late.value.pending.done()
        start = time.monotonic()
        for number in range(80):
            assert await store.save([kit.block(kit.key("next", number))]) == 1
        assert time.monotonic() - start < 72 * 0.5  # not eighty times the tier's deadline
        assert two.calls["save"] == 1
        two.recover()
        await until(late.value.pending.done)


async def test_tier_written_behind_that_hangs_does_not_hold_up_saves(kit):
    one, two = DictTier(), DictTier()
    keys = kit.keys("behind", count=40)
    room = 8 * kit.frame_nbytes
    async with tiered(one, two, write=("through", "behind"), queue_nbytes=room) as store:
        two.hang |= {"save", "lookup"}
        start = time.monotonic()
        for key in keys:
            assert await store.save([kit.block(key)]) == 1
            assert store.tiers[1].backlog.nbytes <= room
        assert time.monotonic() - start < 39 * 0.5  # not forty times
        two.recover()
        await until(lambda: not len(store.tiers[1].backlog))
        assert two.keys() == set(keys[:8])
        assert await store.save([kit.block(kit.key("after"))]) == 1
        await until(lambda: not len(store.tiers[1].backlog))
        assert kit.key("after") in two.blocks


async def test_close_returns_with_a_tier_that_hangs_in_everything(kit):
    one, two = DictTier(), DictTier()
    async with tiered(one, two, write=("through", "behind")) as store:
        two.hang |= {"lookup", "save", "close"}
        await store.save([kit.block(kit.key("waiting"))])
        await store.lookup([kit.key("absent")])
        start = time.monotonic()
        await store.close()
        assert time.monotonic() - start < 60
        await store.close()
        before = asyncio.all_tasks()
    two.recover()
    await until(lambda: not (asyncio.all_tasks() & before) - {asyncio.current_task()})


# ------------------------------------------------------------------------------------ dead


async def test_deletes_that_a_dead_tier_missed_are_made_up_for(kit):
    one, two = DictTier(), DictTier()
    keys = kit.keys("owed", count=3)
    async with tiered(one, two) as store:
        await store.save(kit.chain(keys))
        two.down = True
        await store.delete(keys[:2])
        assert two.keys() == set(keys)
        two.down = False
        await until(lambda: two.keys() == {keys[2]})


class Stubborn(DictTier):
    """Fails to delete a block once."""

    failed = False

    async def delete(self, keys):
        if self.keys() & set(keys) and not self.failed:
            self.failed = True
            raise BackendUnavailable("not now")
        await super().delete(keys)


async def test_a_block_deleted_while_it_is_written_goes_though_that_fails_at_first(kit):
    one, two = DictTier(), Stubborn()
    key = kit.key("stubborn")
    async with tiered(one, two, write=("through", "behind")) as store:
        two.hang.add("save")
        await store.save([kit.block(key)])
        await until(lambda: two.calls["save"])
        await store.delete([key])
        two.recover()
        await until(lambda: two.failed)
        await until(lambda: key not in two.blocks)


async def test_a_block_deleted_while_its_write_is_given_up_goes_once_that_ends(kit):
    one, two = DictTier(), DictTier()
    key = kit.key("given up")
    async with tiered(one, two, write=("through", "behind"), deadline_s=0.05) as store:
        two.hang.add("save")
        await store.save([kit.block(key)])
        await until(lambda: two.calls["save"])
        await store.delete([key])
        await until(lambda: not store.tiers[1].prompt)  # the write was given up
        await until(lambda: store.tiers[1].prompt)
        two.recover()
        await until(lambda: key in two.blocks)
        await until(lambda: key not in two.blocks)


async def test_copies_whose_write_was_given_up_are_taken_again_and_fit_once_it_ends(kit):
    one, two = DictTier(), DictTier()
    key, other = kit.keys("given up, again", count=2)
    async with tiered(
        one,
        two,
        write=("through", "behind"),
        deadline_s=0.05,
        queue_nbytes=kit.frame_nbytes,  # of one copy
    ) as store:
        two.hang.add("save")
        await store.save([kit.block(key)])
        await until(lambda: two.calls["save"])
        await until(lambda: not store.tiers[1].prompt)  # the write was given up
        await until(lambda: store.tiers[1].prompt)
        backlog = store.tiers[1].backlog
        assert await backlog.add([kit.block(other)]) == 0  # its memory is still read
        two.recover()
        await until(lambda: key in two.blocks)
        await until(lambda: backlog._buffers._free)
        two.blocks.clear()
        for one_more in (other, key):
            assert await backlog.add([kit.block(one_more)]) == 1
            await until(lambda one_more=one_more: one_more in two.blocks)
            await until(lambda: not len(backlog))
        assert not backlog._known


async def test_deletes_that_are_owed_are_bounded(kit, monkeypatch):
    monkeypatch.setattr(tiered_tier, "_MAX_OWED", 4)
    one, two = DictTier(), DictTier()
    async with tiered(one, two) as store:
        two.down = True
        for key in kit.keys("owed", count=10):
            await store.delete([key])
        assert len(store.tiers[1]._owed) == 4


async def test_copies_that_no_memory_is_left_for_are_dropped(kit):
    one, two = DictTier(), DictTier()
    vast = replace(kit.block(kit.key("vast")), data=torch.zeros(1).byte().expand(1 << 60))
    async with tiered(one, two, queue_nbytes=1 << 61) as store:
        assert await store.tiers[1].backlog.add([vast, kit.block(kit.key("small"))]) == 1
        assert store.tiers[1].backlog.nbytes == kit.frame_nbytes
        await until(lambda: two.keys() == {kit.key("small")})


async def test_a_block_saved_again_after_a_missed_delete_stays(kit):
    one, two = DictTier(), DictTier()
    key = kit.key("again")
    async with tiered(one, two) as store:
        await store.save([kit.block(key)])
        two.down = True
        await store.delete([key])
        two.down = False
        assert await store.save([kit.block(key)]) == 1
        await until(lambda: store.tiers[1]._probing is None)
        assert key in two.blocks


async def test_delete_fails_if_no_tier_could(kit):
    one = DictTier()
    async with tiered(one) as store:
        one.down = True
        with pytest.raises(BackendUnavailable, match="no tier could delete"):
            await store.delete([kit.key("x")])


async def test_tier_that_cannot_be_reached_at_first_is_opened_later(kit):
    one, two = DictTier(), DictTier()
    two.open_error = BackendUnavailable("refused")
    keys = kit.keys("later", count=2)
    two.put(*kit.chain(keys))
    async with tiered(one, two) as store:
        assert await store.lookup(keys) == 0
        assert await store.save(kit.chain(kit.keys("meanwhile", count=2))) == 2
        two.open_error = None
        await until(lambda: two.is_open and store.tiers[1].prompt)
        assert await store.lookup(keys) == 2


async def test_tier_out_of_reach_when_a_store_is_opened_again_is_opened_later(kit):
    one, two = DictTier(), DictTier()
    one.open_error = BackendUnavailable("refused")
    store = TieredBackend([one, two], TieredSettings(write=("through", "behind")))
    with pytest.raises(BackendUnavailable, match="no tier can be reached"):
        await store.open([])
    assert not two.is_open
    one.open_error, two.open_error = None, BackendUnavailable("refused")
    await store.open([])
    two.open_error = None
    await until(lambda: two.is_open and store.tiers[1].prompt)
    await store.close()


async def test_opening_can_be_tried_again(kit):
    one, two = DictTier(), DictTier()
    two.open_error = ConfigurationError("wrong password")
    store = TieredBackend([one, two])
    with pytest.raises(ConfigurationError, match="tier dicttier2: wrong password"):
        await store.open([])
    assert not one.is_open
    two.open_error = None
    await store.open([])
    assert await store.save([kit.block(kit.key("x"))]) == 1
    await store.close()


# ------------------------------------------------------------------------------------ lying


async def test_tier_that_boasts_costs_nothing_but_the_hit(kit):
    one, two = DictTier(), DictTier()
    keys = kit.keys("boast", count=4)
    two.put(*kit.chain(keys)[:3])
    one.boast = True
    async with tiered(one, two) as store:
        assert await store.lookup(keys) == 4
        into = kit.buffers(4)
        assert await store.load(keys, into) == 3
        assert all(kit.holds(b, key) for b, key in zip(into[:3], keys, strict=False))


def spoil(kit, tier, keys, at, damage):
    """Makes the frame of `keys[at]` in `tier` one that is not sound."""
    block = tier.blocks[keys[at]]
    match damage:
        case "header" | "payload":
            block.data[3 if damage == "header" else 1000] ^= 1
        case "other key":
            block.data.copy_(tier.blocks[keys[0]].data)
        case "other layout":
            header = FrameHeader(16, kit.layout.block_nbytes, b"another layout!!", keys[at])
            frame.seal(block.data, header)
        case "length":
            tier.blocks[keys[at]] = replace(block, data=block.data[:4096].clone())
        case "zeros":
            block.data.zero_()


@pytest.mark.parametrize("damage", ["header", "payload", "other key", "length", "zeros"])
async def test_bad_frame_is_deleted_where_it_was_and_loaded_from_the_next_tier(kit, damage):
    one, two = DictTier(variable_length=True), DictTier(variable_length=True)
    keys = kit.keys("bad", damage, count=5)
    for key in keys:
        one.put(sealed(kit, key))
        two.put(sealed(kit, key))
    spoil(kit, one, keys, 2, damage)
    async with tiered(one, two, layouts=[kit.layout], verify_frames=True, promote=False) as store:
        into = kit.buffers(5)
        assert await store.load(keys, into) == 5
        assert all(kit.holds(b, key) for b, key in zip(into, keys, strict=True))
        assert one.keys() == set(keys) - {keys[2]}
        assert two.keys() == set(keys)


async def test_encoded_frames_pass_and_one_that_is_bad_in_a_tier_comes_from_the_next(kit, tmp_path):
    secret = tmp_path / "key"
    secret.write_bytes(bytes(range(32)))
    one, two = DictTier(), DictTier()
    keys = kit.keys("encoded", count=4)
    tiers = TieredBackend([one, two], TieredSettings(patience_s=5.0))
    async with kit.opened(open_backend(tiers, codec="aes-gcm", key_file=str(secret))) as store:
        assert await store.save(kit.chain(keys)) == 4
        one.blocks[keys[2]].data[1000] ^= 1
        into = kit.buffers(4)
        assert await store.load(keys, into) == 4
        assert all(kit.holds(b, key) for b, key in zip(into, keys, strict=True))
        assert all(key in one.blocks for key in keys[:2])


async def test_a_bad_frame_is_not_promoted(kit):
    one, two = DictTier(), DictTier()
    key = kit.key("not promoted")
    two.put(sealed(kit, key))
    two.blocks[key].data[200] ^= 1
    async with tiered(one, two, layouts=[kit.layout], verify_frames=True) as store:
        assert await store.load([key], kit.buffers(1)) == 0
    assert not one.blocks
    assert not two.blocks


@pytest.fixture
def checksums(monkeypatch):
    """The checksums that were computed; cleared by tests that saved before."""
    computed = []
    compute = frame.FrameChecksum.digest

    def counted(checksum):
        computed.append(checksum)
        return compute(checksum)

    monkeypatch.setattr(frame.FrameChecksum, "digest", counted)
    return computed


async def test_every_frame_is_checked_once(kit, checksums):
    one, two = DictTier(), DictTier()
    keys = kit.keys("once", count=6)
    one.put(*(sealed(kit, key) for key in keys[:4]))
    two.put(*(sealed(kit, key) for key in keys[4:]))
    store = open_backend(TieredBackend([one, two], TieredSettings(patience_s=60.0)))
    async with kit.opened(store):
        checksums.clear()
        assert await store.load(keys, kit.buffers(6)) == 6
        assert len(checksums) == 6


@pytest.mark.parametrize("damage", ["payload", "other key", "other layout", "zeros"])
async def test_tiers_that_lie_are_never_a_hit(kit, damage):
    lying = [DictTier(), DictTier()]
    keys = kit.keys("lies", damage, count=3)
    for tier in lying:
        tier.put(*(sealed(kit, key) for key in keys))
        spoil(kit, tier, keys, 1, damage)
    store = open_backend(TieredBackend(lying, TieredSettings(patience_s=60.0)))
    async with kit.opened(store):
        assert await store.load(keys, kit.buffers(3)) == 1
        # What nobody can use is gone from both.
        assert [keys[1] in tier.blocks for tier in lying] == [False, False]


async def test_what_is_damaged_on_its_way_out_of_the_tiers_is_never_a_hit(kit, checksums):
    tier = DictTier()
    keys = kit.keys("way out", count=2)
    tier.put(*(sealed(kit, key) for key in keys))

    class Damaging(FaultyBackend):
        async def load(self, keys, into):
            loaded = await self.inner.load(keys, into)
            into[-1][1000] ^= 1
            return loaded

    store = open_backend(Damaging(TieredBackend([tier], TieredSettings(patience_s=60.0))))
    async with kit.opened(store):
        checksums.clear()
        assert await store.load(keys, kit.buffers(2)) == 1
        assert len(checksums) == 4  # in the tier, and around what may damage


async def test_tiers_that_are_not_checked_are_checked_as_a_whole(kit, checksums):
    tier = DictTier()
    key = kit.key("unchecked")
    tier.put(sealed(kit, key))
    tier.blocks[key].data[1000] ^= 1
    settings = TieredSettings(patience_s=60.0, verify_frames=False)
    store = open_backend(TieredBackend([tier], settings))
    async with kit.opened(store):
        checksums.clear()
        assert await store.load([key], kit.buffers(1)) == 0
        assert len(checksums) == 1
