"""A store that fails is left alone, and used again soon after it works again."""

from __future__ import annotations

import asyncio
import logging
import time
from itertools import pairwise

import pytest
from tier_store import DictTier, until

from kvconnect.backends import GuardedBackend
from kvconnect.backends.guard import breaker, gauges
from kvconnect.backends.guard.breaker import BreakerState
from kvconnect.errors import BackendTimeout, BackendUnavailable, ConfigurationError
from kvconnect.trace import metrics

FIRST, LAST, HALF_OPEN = 0.05, 0.2, 0.05


class Store(DictTier):
    """Answers, refuses, or never answers."""

    def __init__(self):
        super().__init__(before=self._act)
        self.mode = "answers"
        self.times = []

    async def _act(self, name):
        if name == "lookup":
            self.times.append(time.monotonic())
        if self.mode == "refuses" and name != "close":
            raise ConnectionRefusedError("nobody there")
        if self.mode == "freezes" and name != "close":
            await self.go.wait()


@pytest.fixture
def quick(monkeypatch):
    """Short pauses between probes."""
    for name, value in (("FIRST_PAUSE", FIRST), ("LAST_PAUSE", LAST), ("HALF_OPEN", HALF_OPEN)):
        monkeypatch.setattr(breaker, f"_{name}_S", value)


@pytest.fixture
async def inner():
    return Store()


@pytest.fixture
async def store(inner, kit, quick):
    guarded = GuardedBackend(inner, deadline_s=0.5)
    await guarded.open([kit.layout])
    yield guarded
    inner.go.set()
    await guarded.close()


async def fail(store, kit, times=5):
    for number in range(times):
        with pytest.raises((BackendUnavailable, BackendTimeout)):
            await store.lookup([kit.key(number)])


def probing(store):
    return store._calls._breaker._probing


async def state(store):
    return BreakerState(int((await store.stats())["breaker_state"]))


def counter(name):
    return metrics.snapshot().get(name, 0)


async def test_it_opens_after_failures_in_a_row_and_calls_fail_without_the_store(store, inner, kit):
    inner.mode = "refuses"
    await fail(store, kit, 4)
    assert store._calls.state is BreakerState.CLOSED
    await fail(store, kit, 1)
    assert store._calls.state is BreakerState.OPEN
    asked, refused = len(inner.asked), counter("store.refused")
    for call in (
        store.lookup([kit.key(1)]),
        store.load([kit.key(1)], kit.buffers(1)),
        store.save([kit.block(kit.key(1))]),
        store.delete([kit.key(1)]),
        store.children(None),
    ):
        with pytest.raises(BackendUnavailable, match=r"left alone for now.*nobody there"):
            await call
    assert len(inner.asked) == asked
    assert counter("store.refused") == refused + 5


async def test_an_answer_in_between_starts_the_count_anew(store, inner, kit):
    for _ in range(3):
        inner.mode = "refuses"
        await fail(store, kit, 4)
        inner.mode = "answers"
        await store.lookup([kit.key(1)])
    assert await state(store) is BreakerState.CLOSED


async def test_it_closes_by_a_probe_of_its_own_never_by_a_users_call(store, inner, kit):
    inner.mode = "refuses"
    await fail(store, kit)
    inner.mode = "answers"
    asked = len(inner.asked)
    with pytest.raises(BackendUnavailable):
        await store.lookup([kit.key(1)])
    await asyncio.wait_for(probing(store), 60)
    (probe,) = inner.asked[asked:]
    assert probe[0] not in [kit.key(number) for number in range(10)]
    assert await store.lookup([kit.key(1)]) == 0
    assert await state(store) is BreakerState.CLOSED


async def test_a_store_that_still_fails_is_probed_at_growing_pauses(store, inner, kit):
    inner.mode = "refuses"
    await fail(store, kit)
    seen = len(inner.asked)
    await until(lambda: len(inner.asked) >= seen + 6)
    pauses = [after - before for before, after in pairwise(inner.times[seen:])]
    assert pauses[0] >= 2 * FIRST
    assert min(pauses[2:]) >= LAST
    assert store._calls.state is not BreakerState.CLOSED


async def test_it_opens_half_while_it_probes(store, inner, kit):
    inner.mode = "refuses"
    await fail(store, kit)
    inner.mode = "freezes"
    asked = len(inner.asked)
    await until(lambda: len(inner.asked) > asked)
    assert store._calls.state is BreakerState.HALF_OPEN
    with pytest.raises(BackendUnavailable):
        await store.lookup([kit.key(1)])
    await until(lambda: store._calls.state is BreakerState.OPEN)


async def test_a_frozen_store_is_used_again_as_soon_as_it_thaws(store, inner, kit, monkeypatch):
    # With the pauses of everyday: the probe that hangs answers, nobody waits for the next one.
    monkeypatch.setattr(breaker, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(breaker, "_LAST_PAUSE_S", 1000.0)
    inner.mode = "refuses"
    await fail(store, kit)
    inner.mode = "freezes"
    asked = len(inner.asked)
    await until(lambda: len(inner.asked) > asked and store._calls.state is BreakerState.OPEN)
    inner.go.set()
    inner.mode = "answers"
    await asyncio.wait_for(probing(store), 60)
    assert await store.lookup([kit.key(1)]) == 0


async def test_a_probe_that_hangs_for_ever_does_not_stop_the_next_one(store, inner, kit):
    inner.mode = "freezes"
    await asyncio.gather(*(fail(store, kit, 1) for _ in range(5)))
    asked = len(inner.asked)
    await until(lambda: len(inner.asked) >= asked + 2)
    inner.mode = "answers"  # for new calls; those that hang go on hanging
    await asyncio.wait_for(probing(store), 60)


async def test_few_probes_hang_at_a_time(inner, kit, monkeypatch):
    monkeypatch.setattr(breaker, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(breaker, "_LAST_PAUSE_S", 0.001)
    monkeypatch.setattr(breaker, "_HALF_OPEN_S", 0.001)
    hanging = most = started = 0

    async def hang(keys):
        nonlocal hanging, most, started
        started += 1
        hanging += 1
        most = max(most, hanging)
        try:
            await asyncio.Event().wait()
        finally:
            hanging -= 1

    store = GuardedBackend(inner, deadline_s=1000.0)
    await store.open([kit.layout])
    inner.mode = "refuses"
    await fail(store, kit)
    inner.lookup = hang
    await until(lambda: started >= 30)
    assert most <= 9
    await store.close()
    await asyncio.sleep(0)
    assert hanging == 0


async def test_a_configuration_error_is_no_failure_of_the_store(store, kit):
    for _ in range(10):
        with pytest.raises(ConfigurationError):
            await store.save([kit.block(kit.key(1), nbytes=4096)])
    assert await state(store) is BreakerState.CLOSED


async def test_opening_and_closing_are_told(store, inner, kit, caplog):
    opened, closed = counter("store.breaker.opened"), counter("store.breaker.closed")
    inner.mode = "refuses"
    with caplog.at_level(logging.INFO, "kvconnect"):
        await fail(store, kit)
        inner.mode = "answers"
        await asyncio.wait_for(probing(store), 60)
    assert counter("store.breaker.opened") == opened + 1
    assert counter("store.breaker.closed") == closed + 1
    assert "Store: is left alone until it answers again: 5 failures in a row" in caplog.text
    assert "Store: answers again" in caplog.text


async def test_stats_and_gauges_tell_the_state_without_asking_a_store_that_fails(store, inner, kit):
    def told_now():
        return {one.name: one.value for one in metrics.gauges() if one.labels == store._labels}

    inner.put(*kit.chain(kit.keys("there", count=3)))
    assert (await store.stats())["blocks"] == 3
    assert (await asyncio.to_thread(told_now))["store.blocks"] == 3
    inner.mode = "refuses"
    await fail(store, kit)
    asked = inner.calls["stats"]
    assert (await store.stats())["breaker_state"] == 2
    told = await asyncio.to_thread(told_now)
    assert told["store.breaker_state"] == 2
    assert told["store.blocks"] == 3  # the last that is known
    assert inner.calls["stats"] == asked
    await store.close()
    assert not told_now()


async def test_gauges_of_a_store_that_hangs_are_read_all_the_same(store, inner, monkeypatch):
    monkeypatch.setattr(gauges, "_LONGEST_WAIT_S", 0.01)
    inner.mode = "freezes"
    for _ in range(3):
        told = await asyncio.to_thread(metrics.gauges)
        assert {one.name for one in told if one.labels == store._labels} >= {"store.running"}
    assert inner.calls["stats"] == 1


async def test_a_closed_store_probes_no_more(store, inner, kit):
    inner.mode = "refuses"
    await fail(store, kit)
    task = probing(store)
    await store.close()
    await asyncio.wait({task}, timeout=60)
    assert task.cancelled()


# ---------------------------------------------------------------------- kinds of calls


@pytest.fixture
async def kinds(kit, quick):
    """A store that finds everything, of which calls of some kinds hang."""
    guarded = GuardedBackend(inner := DictTier(), deadline_s=0.1)
    inner.boast = True
    await guarded.open([kit.layout])
    yield guarded, inner
    inner.go.set()
    await guarded.close()


async def times_out(store, call):
    """Has `call` hang until a deadline of its own."""
    store._calls.deadline_s = 0.1
    with pytest.raises(BackendTimeout):
        await call
    store._calls.deadline_s = 60.0


async def test_loads_that_hang_open_it_though_lookups_are_answered_in_between(kinds, kit):
    store, inner = kinds
    inner.hang = {"load"}
    for number in range(5):
        assert await store.lookup([kit.key(number)]) == 1
        await times_out(store, store.load([kit.key(number)], kit.buffers(1)))
    asked = inner.calls.copy()
    for number in range(20):
        with pytest.raises(BackendUnavailable, match="load: is left alone for now"):
            await store.lookup([kit.key(number)])
        with pytest.raises(BackendUnavailable, match="load: is left alone for now"):
            await store.load([kit.key(number)], kit.buffers(1))
    assert inner.calls == asked
    assert not store.available
    assert await store.save([kit.block(kit.key(1))]) == 1  # saves have not failed


async def test_loads_that_hung_are_probed_by_loads(kinds, kit):
    store, inner = kinds
    inner.hang = {"load"}
    await asyncio.gather(
        *(store.load([kit.key(n)], kit.buffers(1)) for n in range(5)), return_exceptions=True
    )
    assert not store.available
    asked = inner.calls.copy()
    await until(lambda: inner.calls["load"] >= asked["load"] + 2)
    assert set(inner.calls - asked) == {"load"}
    assert not store.available  # lookups are not asked, and would not tell
    inner.hang = set()
    inner.go.set()
    await asyncio.wait_for(store._calls._loads._probing, 60)
    assert await store.lookup([kit.key(1)]) == 1
    assert await store.load([kit.key(1)], kit.buffers(1)) == 0


async def test_saves_that_hang_are_refused_alone_and_tried_again_by_one_of_them(kinds, kit):
    store, inner = kinds
    inner.hang = {"save"}
    for number in range(5):
        await times_out(store, store.save([kit.block(kit.key(number))]))
        assert await store.lookup([kit.key(number)]) == 1
    with pytest.raises(BackendUnavailable, match="save: is left alone for now"):
        await store.save([kit.block(kit.key(1))])
    assert store.available
    assert await store.lookup([kit.key(1)]) == 1
    inner.hang = set()
    saved = 0
    async with asyncio.timeout(60):
        while not saved:
            try:
                saved = await store.save([kit.block(kit.key(1))])
            except BackendUnavailable:
                await asyncio.sleep(0)
    assert await store.save([kit.block(kit.key(2))]) == 1


async def test_one_tier_that_is_dead_does_not_slow_another(inner, kit):
    dead, alive = (GuardedBackend(one, deadline_s=60.0) for one in (inner, Store()))
    await dead.open([kit.layout])
    await alive.open([kit.layout])
    inner.mode = "freezes"
    hanging = [asyncio.ensure_future(dead.lookup([kit.key(n)])) for n in range(100)]
    started = time.monotonic()
    for number in range(100):
        await alive.lookup([kit.key(number)])
    assert time.monotonic() - started < 60.0
    inner.go.set()
    await asyncio.gather(*hanging)
    await dead.close()
    await alive.close()
