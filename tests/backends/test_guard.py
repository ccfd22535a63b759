"""What stands around every backend: time, frames, errors."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from tier_store import DictTier

from kvconnect import frame
from kvconnect.backend import Child, StoredBlock, StoredEntry
from kvconnect.backends import GuardedBackend
from kvconnect.backends.guard import breaker, pieces, scan
from kvconnect.backends.guard.calls import counted
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.errors import (
    BackendTimeout,
    BackendUnavailable,
    ConfigurationError,
    RetryLater,
    UsageError,
)
from kvconnect.keys import BlockKey
from kvconnect.trace import metrics


class Recording(DictTier):
    """A plain dict of bytes; `before` runs at the start of each call but those named here."""

    def __init__(self, before=None):
        super().__init__(before=before)

    async def _begin(self, name):
        if name not in {"open", "close", "stats"}:
            await super()._begin(name)


async def until_closed(store):
    """Return once the breaker of `store` is closed."""
    probing = store._calls._breaker._probing
    if probing is not None:
        await asyncio.wait_for(probing, 60)


def counter(name):
    return metrics.snapshot().get(name, 0)


@pytest.fixture
async def inner():
    return Recording()


@pytest.fixture
async def store(inner, kit):
    async with kit.opened(GuardedBackend(inner)) as guarded:
        yield guarded


# ---------------------------------------------------------------------------------------- frames


async def test_what_is_stored_is_a_sound_frame_of_the_key(store, inner, kit):
    key = kit.key(1)
    await store.save([kit.block(key, tokens=[5, 6, 7])])
    header = frame.check(inner.value(key), key, {kit.layout.fingerprint()})
    assert (header.valid_tokens, header.payload_nbytes) == (3, kit.layout.block_nbytes)


async def test_bad_block_ends_the_run_is_dropped_counted_and_warned_of_once(
    store, inner, kit, caplog
):
    keys = kit.keys("bad", count=5)
    await store.save(kit.chain(keys))
    inner.value(keys[2])[4000] ^= 1
    before, into = counter("store.bad_frame"), kit.buffers(5)
    metrics._warned.clear()
    with caplog.at_level(logging.WARNING, "kvconnect"):
        assert await store.load(keys, into) == 2
        assert await store.lookup(keys) == 2
        assert await store.load(keys, into) == 2
    assert all(kit.holds(b, key) for b, key in zip(into[:2], keys, strict=False))
    assert counter("store.bad_frame") == before + 1
    assert len([r for r in caplog.records if "checksum" in r.message]) == 1
    assert await store.save(kit.chain(keys)) == 5
    assert await store.load(keys, into) == 5


async def test_all_bad_blocks_of_a_piece_are_dropped_at_once(store, inner, kit):
    keys = kit.keys("many bad", count=6)
    await store.save(kit.chain(keys))
    for key in keys[3:]:
        inner.value(key)[200] ^= 1
    assert await store.load(keys, kit.buffers(6)) == 3
    assert sorted(inner.blocks) == sorted(keys[:3])


async def test_pieces_are_checked_while_the_next_ones_are_read(kit, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 2 * kit.frame_nbytes)
    inner = Recording()
    async with kit.opened(GuardedBackend(inner)) as store:
        keys = kit.keys("pieces", count=9)
        assert await store.save(kit.chain(keys)) == 9
        assert inner.calls["save"] == 5
        into = kit.buffers(9)
        assert await store.load(keys, into) == 9
        assert inner.calls["load"] == 5
        assert all(kit.holds(b, key) for b, key in zip(into, keys, strict=True))
        inner.value(keys[4])[1000] ^= 1
        assert await store.load(keys, kit.buffers(9)) == 4
        del inner.blocks[keys[3]]
        assert await store.load(keys, kit.buffers(9)) == 3


async def test_block_that_is_found_but_cannot_be_loaded_is_dropped_and_saved_anew(
    store, inner, kit, monkeypatch
):
    key = kit.key("misfit")
    await store.save([kit.block(key)])

    async def load(keys, into):
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(inner, "load", load)
        before = counter("store.bad_frame")
        for _ in range(2):
            assert await store.load([key], kit.buffers(1)) == 0
        assert counter("store.bad_frame") == before + 1
    assert await store.lookup([key]) == 0
    assert await store.save([kit.block(key)]) == 1
    assert await store.load([key], kit.buffers(1)) == 1


async def test_block_that_is_saved_just_after_it_was_asked_for_is_not_dropped(
    store, inner, kit, monkeypatch
):
    key, load = kit.key("late"), inner.load

    async def saved_after(keys, into):
        monkeypatch.setattr(inner, "load", load)
        filled = await load(keys, into)
        await store.save([kit.block(key)])
        return filled

    monkeypatch.setattr(inner, "load", saved_after)
    before = counter("store.bad_frame")
    (into,) = kit.buffers(1)
    assert await store.load([key], [into]) == 0
    assert kit.untouched(into)
    assert counter("store.bad_frame") == before
    assert await store.load([key], [into]) == 1


@pytest.mark.parametrize("answer", [-1, 2, None, "1", 1.0])
def test_impossible_count_is_a_failure_of_the_store(answer):
    with pytest.raises(BackendUnavailable, match="load of 1 blocks answered"):
        counted(answer, 1, "store", "load")


async def test_check_that_is_switched_off_is_logged(kit, inner, caplog):
    with caplog.at_level(logging.WARNING, "kvconnect"):
        guarded = GuardedBackend(inner, verify_frames=False)
    assert "are not checked" in caplog.text
    async with kit.opened(guarded) as store:
        await store.save([kit.block(kit.key(1))])
        inner.value(kit.key(1))[300] ^= 1
        assert await store.load([kit.key(1)], kit.buffers(1)) == 1


async def test_buffer_of_the_wrong_length_and_unknown_group_are_named(store, kit):
    with pytest.raises(ConfigurationError, match=f"{kit.frame_nbytes} are needed"):
        await store.save([kit.block(kit.key(1), nbytes=4096)])
    block = kit.block(kit.key(1))
    with pytest.raises(ConfigurationError, match="group=3"):
        await store.save([StoredBlock(block.key, block.data, group=3)])


# ---------------------------------------------------------------------------------------- errors


async def test_a_backend_that_cancels_itself_is_unavailable(kit):
    async def cancel(name):
        if name != "open":
            raise asyncio.CancelledError

    async with kit.opened(GuardedBackend(Recording(cancel))) as store:
        with pytest.raises(BackendUnavailable, match="cancelled"):
            await store.lookup([kit.key(1)])
        with pytest.raises(BackendUnavailable, match="cancelled"):
            await store.load([kit.key(1)], kit.buffers(1))
        with pytest.raises(BackendUnavailable, match="cancelled"):
            await store.save([kit.block(kit.key(1))])


@pytest.fixture
def elsewhere():
    """A loop on a thread of its own: what ends a loop ends not the test's."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield lambda call: asyncio.run_coroutine_threadsafe(call, loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "error",
    [
        KeyboardInterrupt(),
        SystemExit(3),
        BaseExceptionGroup("several", [KeyboardInterrupt()]),
        StopIteration(1),
        StopAsyncIteration(),
        type("Ours", (BaseException,), {})("theirs"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_no_ordinary_error_is_a_failed_call(kit, elsewhere, error):
    failing = ["open"]

    async def fail(name):
        if name in failing:
            raise error

    store = GuardedBackend(DictTier(before=fail))
    with pytest.raises(BackendUnavailable, match="open failed") as raised:
        elsewhere(store.open([kit.layout]))
    assert error in {raised.value.__cause__, raised.value.__cause__.__cause__}
    failing[:] = ["lookup", "save", "stats", "close"]
    elsewhere(store.open([kit.layout]))
    for call in (
        lambda: store.lookup([kit.key(1)]),
        lambda: store.save([kit.block(kit.key(1))]),
        store.stats,
    ):
        with pytest.raises(BackendUnavailable, match="failed"):
            elsewhere(call())
    failing.remove("lookup")
    assert elsewhere(store.load([kit.key(1)], kit.buffers(1))) == 0
    elsewhere(store.close())


async def test_a_method_that_is_no_coroutine_fails_as_one(kit):
    class Plain(Recording):
        def open(self, layouts, access="store"):
            raise KeyError(layouts)

    with pytest.raises(BackendUnavailable, match="open failed"):
        await GuardedBackend(Plain()).open([kit.layout])


async def test_of_a_long_answer_only_the_wrong_part_is_made_text(kit):
    """The text of all of it would keep the event loop for seconds."""
    written = []

    class Written(Child):
        def __repr__(self):
            written.append(self)
            return "a child"

    tokens = np.zeros(1, np.int32)
    many = [Written(kit.key(number), tokens) for number in range(1000)]

    class Odd(DictTier):
        async def children(self, key):
            return [*many, Written(b"short", tokens)]

        async def describe(self, keys):
            return many

    async with kit.opened(GuardedBackend(Odd())) as guard:
        with pytest.raises(BackendUnavailable, match="children answered a child"):
            await guard.children(None)
        assert len(written) == 1
        with pytest.raises(BackendUnavailable, match=r"describe answered \[a child, "):
            await guard.describe([kit.key("a")])
        assert len(written) < 20


async def test_call_before_open_is_a_bug_of_the_caller(kit, inner):
    with pytest.raises(UsageError, match=r"open\(\) was not called"):
        await GuardedBackend(inner).lookup([kit.key(1)])


async def test_failed_open_names_the_store_and_can_be_closed(kit):
    class Unreachable(Recording):
        async def open(self, layouts, access="store"):
            raise ConnectionRefusedError("nobody there")

    guarded = GuardedBackend(Unreachable())
    with pytest.raises(BackendUnavailable, match="Unreachable: open failed: nobody there"):
        await guarded.open([kit.layout])
    await guarded.close()


# ---------------------------------------------------------------------------------------- time


class Gate:
    """Holds every call of the named operations until `released`."""

    def __init__(self, *names):
        self.names = names
        self.entered = asyncio.Event()
        self.released = asyncio.Event()

    async def __call__(self, name):
        if name in self.names:
            self.entered.set()
            await self.released.wait()


async def test_abandoned_load_starts_no_further_piece(kit, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_NBYTES", kit.frame_nbytes)
    gate = Gate("load")
    inner = Recording(gate)
    async with kit.opened(GuardedBackend(inner)) as store:
        keys = kit.keys("piece", count=5)
        await store.save(kit.chain(keys))
        store._calls.deadline_s = 0.05
        into = kit.buffers(5)
        with pytest.raises(BackendTimeout) as raised:
            await store.load(keys, into)
        gate.released.set()
        await asyncio.wait_for(asyncio.wrap_future(raised.value.pending), 60)
        assert inner.calls["load"] == 1
        assert all(kit.untouched(buffer) for buffer in into[1:])


async def test_load_and_save_are_never_cancelled_but_a_lookup_is(kit):
    ended = {}

    async def hang(name):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended[name] = "cancelled"
            raise

    store = GuardedBackend(Recording(hang))
    await store.open([kit.layout])
    store._calls.deadline_s = 0.05  # of no call that opens it
    for call in (
        store.lookup([kit.key(1)]),
        store.load([kit.key(1)], kit.buffers(1)),
        store.save([kit.block(kit.key(1))]),
    ):
        with pytest.raises(BackendTimeout):
            await call
    await asyncio.sleep(0)
    assert ended == {"lookup": "cancelled"}
    await store.close()


async def test_cancelling_a_load_takes_effect_only_when_the_store_is_done(kit):
    gate = Gate("load")
    async with kit.opened(GuardedBackend(Recording(gate))) as store:
        await store.save([kit.block(kit.key(1))])
        into = kit.buffers(1)
        loading = asyncio.ensure_future(store.load([kit.key(1)], into))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        loading.cancel()
        done, _ = await asyncio.wait({loading}, timeout=0.05)
        assert not done
        gate.released.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert kit.holds(into[0], kit.key(1))


async def test_too_many_abandoned_calls_fail_new_ones_at_once_until_they_end(kit, monkeypatch):
    monkeypatch.setattr(breaker, "_FIRST_PAUSE_S", 0.01)
    gate = Gate("load")
    inner = Recording(gate)
    monkeypatch.setattr(breaker, "_FAILURES_TO_OPEN", 1000)
    store = GuardedBackend(inner)
    await store.open([kit.layout])
    key = kit.key(1)
    await store.save([kit.block(key)])
    store._calls.deadline_s = 0.02
    outcomes = Counter()
    pending = []
    for _ in range(40):
        try:
            await store.load([key], kit.buffers(1))
        except BackendTimeout as error:
            outcomes["timeout"] += 1
            pending.append(asyncio.wrap_future(error.pending))
        except BackendUnavailable:
            outcomes["refused"] += 1
    assert outcomes["timeout"] < 40
    assert inner.calls["load"] == outcomes["timeout"]
    with pytest.raises(BackendUnavailable, match="past their deadline still run"):
        await store.lookup([key])
    gate.released.set()
    await asyncio.wait_for(asyncio.gather(*pending), 60)
    store._calls.deadline_s = 60.0
    await until_closed(store)
    assert await store.load([key], kit.buffers(1)) == 1
    await store.close()


async def test_calls_beyond_the_limit_wait_for_their_turn(kit):
    running = most = 0

    async def watch(name):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    async with kit.opened(GuardedBackend(Recording(watch))) as store:
        await asyncio.gather(*(store.lookup([kit.key(n)]) for n in range(500)))
    assert 1 < most <= 64


async def test_close_returns_while_a_call_hangs(kit):
    hanging = asyncio.Event()

    async def hang(name):
        await hanging.wait()

    store = GuardedBackend(Recording(hang))
    await store.open([kit.layout])
    store._calls.deadline_s = 0.05  # of no call that opens it
    loading = asyncio.ensure_future(store.load([kit.key(1)], kit.buffers(1)))
    await asyncio.sleep(0)
    await asyncio.wait_for(store.close(), 60)
    with pytest.raises(BackendTimeout) as raised:
        await loading
    hanging.set()
    await asyncio.wait_for(asyncio.wrap_future(raised.value.pending), 60)


@pytest.mark.parametrize("error", [ConfigurationError("x"), RetryLater("x"), OSError("x")])
async def test_close_never_raises(kit, error, caplog):
    inner = Recording()

    async def close():
        raise error

    inner.close = close
    guarded = GuardedBackend(inner)
    await guarded.open([kit.layout])
    await guarded.close()
    assert "x" in caplog.text


async def test_close_returns_while_the_close_of_the_store_hangs(kit, caplog):
    class Hanging(Recording):
        async def close(self):
            await asyncio.Event().wait()

    store = GuardedBackend(Hanging())
    await store.open([kit.layout])
    store._calls.deadline_s = 0.05  # of no call that opens it
    await asyncio.wait_for(store.close(), 60)
    await store.close()


async def test_close_that_is_given_up_goes_on_and_can_be_waited_for(kit):
    class Closing(Recording):
        closed = False

        async def close(self):
            self.closed = True

    gate = Gate("lookup")
    inner = Closing(gate)
    store = GuardedBackend(inner, deadline_s=60.0)
    await store.open([kit.layout])
    call = asyncio.create_task(store.lookup([kit.key("slow")]))
    await gate.entered.wait()
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not inner.closed
    again = asyncio.create_task(store.close())
    gate.released.set()
    await again
    await call
    assert inner.closed
    await store.close()


async def test_a_store_of_ours_whose_object_somebody_changed_sees_every_call(kit):
    seen, inner = [], MemoryBackend()

    def watched(name):
        call = getattr(inner, name)

        async def watch(*arguments):
            seen.append(name)
            return await call(*arguments)

        setattr(inner, name, watch)

    watched("load")
    watched("save")
    async with kit.opened(GuardedBackend(inner)) as store:
        key = kit.key("mine")
        (into,) = kit.buffers(1)
        assert await store.save([kit.block(key)]) == 1
        assert await store.load([key], [into]) == 1
        assert kit.holds(into, key)
    assert seen == ["save", "load"]


async def test_buffers_beyond_the_keys_stay_as_they_are(kit):
    async with kit.opened(GuardedBackend(MemoryBackend())) as store:
        key = kit.key("one")
        await store.save([kit.block(key)])
        into, more = kit.buffers(2)
        assert await store.load([key], [into, more]) == 1
        assert kit.holds(into, key)
        assert kit.untouched(more)


async def test_the_event_loop_stays_free_while_large_frames_are_hashed(kit, monkeypatch):
    hashed_on = set()
    real = frame.check

    def check(*args, **options):
        hashed_on.add(threading.current_thread().name)
        return real(*args, **options)

    monkeypatch.setattr(frame, "check", check)
    async with kit.opened(GuardedBackend(Recording())) as store:
        keys = kit.keys("hash", count=64)
        await store.save(kit.chain(keys))
        await store.load(keys, kit.buffers(64))
        assert all(name.startswith("kvconnect-frames") for name in hashed_on)


async def test_no_task_or_thread_is_left(kit):
    threads = set(threading.enumerate())
    async with kit.opened(GuardedBackend(Recording())) as store:
        keys = kit.keys("left", count=64)
        await store.save(kit.chain(keys))
        await store.load(keys, kit.buffers(64))
        new = set(threading.enumerate()) - threads
        started = {one for one in new if one.name.startswith("kvconnect-frames")}
    assert started
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()
    assert asyncio.all_tasks() == {asyncio.current_task()}


# ---------------------------------------------------------------------------------------- raw


async def test_raw_access_moves_values_as_they_are_within_the_deadline(kit):
    gate = Gate("lookup")
    inner = Recording(gate)
    key = kit.key("raw")
    async with kit.opened(GuardedBackend(inner)) as store:
        await store.save([kit.block(key)])
    inner.value(key)[3000] ^= 1
    raw = GuardedBackend(inner, raw=True)
    await raw.open([])
    (into,) = kit.buffers(1)
    assert await raw.load([key], [into]) == 1
    assert torch.equal(into, inner.value(key))
    other = kit.key("copy")
    assert await raw.save([StoredBlock(other, into)]) == 1
    assert torch.equal(inner.value(other), inner.value(key))
    raw._calls.deadline_s = 0.05
    with pytest.raises(BackendTimeout):
        await raw.lookup([key])
    await raw.close()


async def test_opened_without_layouts_it_loads_frames_of_any_and_saves_none(kit):
    inner = Recording()
    key = kit.key("any layout")
    async with kit.opened(GuardedBackend(inner)) as store:
        await store.save([kit.block(key)])
    anyone = GuardedBackend(inner)
    await anyone.open([])
    (into,) = kit.buffers(1)
    assert await anyone.load([key], [into]) == 1
    assert kit.holds(into, key)
    with pytest.raises(ConfigurationError, match="opened with 0 layouts"):
        await anyone.save([kit.block(kit.key("new"))])
    await anyone.close()


# ---------------------------------------------------------------------------------------- listings


class Lister(Recording):
    """Lists blocks one by one, and then does `last`."""

    def __init__(self, count, last=None):
        super().__init__()
        self.listed = [StoredEntry(BlockKey(n.to_bytes(32)), 1, 35, 0.0, 0.0) for n in range(count)]
        self.last = last

    async def scan(self):
        for entry in self.listed:
            yield entry
        if self.last is not None:
            await self.last()


async def fails():
    raise OSError("gone")


async def hangs():
    await asyncio.Event().wait()


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
async def test_a_listing_has_every_entry_once_in_few_calls(kit, count, monkeypatch):
    calls = []
    inner = Lister(count)
    async with kit.opened(GuardedBackend(inner)) as store:
        run = store._calls.run

        def counted(*given, **named):
            calls.append(given)
            return run(*given, **named)

        monkeypatch.setattr(store._calls, "run", counted)
        monkeypatch.setattr(scan, "_STEP_S", 60.0)
        assert [entry.key async for entry in store.scan()] == [one.key for one in inner.listed]
        assert len(calls) <= 7 + count // 256


@pytest.mark.parametrize(("last", "error"), [(fails, BackendUnavailable), (hangs, BackendTimeout)])
async def test_what_was_listed_before_a_failure_comes_before_the_error(kit, last, error):
    inner = Lister(300, last)
    async with kit.opened(GuardedBackend(inner, deadline_s=0.2)) as store:
        entries = aiter(store.scan())
        found = [(await anext(entries)).key for _ in inner.listed]
        assert found == [one.key for one in inner.listed]
        with pytest.raises(error):
            await anext(entries)


@pytest.mark.parametrize("answers", [None, []])
async def test_a_listing_that_is_none_is_a_failed_call(kit, answers):
    class Odd(Recording):
        def scan(self):
            return answers

    async with kit.opened(GuardedBackend(Odd())) as store:
        with pytest.raises(BackendUnavailable, match="scan failed"):
            [entry async for entry in store.scan()]


@pytest.mark.parametrize("end", ["soon", float("nan")])
async def test_an_entry_whose_end_is_no_time_is_a_failed_call(kit, end):
    inner = Lister(1)
    inner.listed = [replace(one, expires_at=end) for one in inner.listed]
    async with kit.opened(GuardedBackend(inner)) as store:
        with pytest.raises(BackendUnavailable, match="scan answered"):
            [entry async for entry in store.scan()]


async def test_a_slow_listing_is_not_kept_back_until_a_step_is_full(kit, monkeypatch):
    monkeypatch.setattr(scan, "_STEP_S", 0.0)
    more = asyncio.Event()
    inner = Lister(1, more.wait)
    async with kit.opened(GuardedBackend(inner)) as store:
        entries = aiter(store.scan())
        assert (await anext(entries)).key == inner.listed[0].key
        more.set()
        assert await anext(entries, None) is None
