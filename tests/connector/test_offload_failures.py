"""A store that is slow, full, dead, late or lying costs time, nothing else."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from bench_engine import LAYOUT, BenchEngine, PlainKv, T, llm_args, reference
from stores import DictStore
from waiting import until

from kvconnect import frame
from kvconnect.connector.data import Direction
from kvconnect.connector.io.orders import BlockLoad, LoadBlocks, SaveOrder
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.keys import BlockKey
from kvconnect.trace import metrics

PROMPT = list(range(1, 10 * T + 3))
ANSWER = reference(PROMPT, 3)
SLOT = frame.frame_nbytes(LAYOUT.block_nbytes)
HASTY = {"load_timeout_s": 0.3, "save_timeout_s": 0.3, "lookup_timeout_ms": 60_000}


def filled() -> DictStore:
    """A store that has the prompt."""
    store = DictStore()
    with BenchEngine(llm_args(store)) as bench:
        bench.answer(PROMPT, 3)
    return store


@pytest.fixture
def store() -> Iterator[DictStore]:
    store = filled()
    yield store
    store.open_doors()


def counter(name: str) -> float:
    return metrics.snapshot().get(name, 0)


def checked(bench: BenchEngine) -> int:
    """The answer is right, nothing is left over; how many tokens the store supplied."""
    request = bench.submit(PROMPT, 3)
    bench.run()
    assert request.tokens.view[len(PROMPT) :].tolist() == ANSWER
    assert bench.kv.get_num_free_blocks() == len(bench.kv.pool)
    return bench.store_tokens[request.request_id]


# ---------------------------------------------------------------------- loads


def test_a_block_that_is_gone_leaves_what_was_before_it(store: DictStore) -> None:
    keys = list(store.frames)
    with BenchEngine(llm_args(store)) as bench:
        request = bench.submit(PROMPT, 3)
        while not request.num_external_tokens:
            assert (
                bench.manager._scheduler._finding._prompts[request.request_id].lookup.exception(60)
                is None
            )
            del store.frames[keys[6]]  # after the lookup said yes
            bench.step()
            break
        bench.run()
        assert request.tokens.view[len(PROMPT) :].tolist() == ANSWER
        assert bench.store_tokens[request.request_id] == 6 * T
    assert list(store.frames)[-1] == keys[6] or keys[6] in store.frames  # and it was saved again


@pytest.mark.parametrize("block", [0, 5, 10])
def test_a_flipped_bit_is_a_miss_from_there_on(store: DictStore, block: int) -> None:
    bad = list(store.frames)[block]

    def flip(key: bytes, buffer: object) -> None:
        if key == bad:
            buffer[frame.HEADER_NBYTES + 11] ^= 4

    store.tamper = flip
    with BenchEngine(llm_args(store)) as bench:
        assert checked(bench) == block * T
    store.tamper = lambda *_: None
    with BenchEngine(llm_args(store)) as bench:  # what was computed instead is saved anew
        assert checked(bench) == len(PROMPT) - 1


@pytest.mark.parametrize("call", ["load", "lookup"])
def test_a_store_that_raises_is_a_miss(store: DictStore, call: str) -> None:
    setattr(store, f"{call}_error", RuntimeError("broken pipe"))
    with BenchEngine(llm_args(store)) as bench:
        assert checked(bench) == 0


def test_a_load_past_its_deadline_is_computed_and_its_late_bytes_hit_no_block(
    store: DictStore,
) -> None:
    store.at_load.shut()
    kv = PlainKv()
    timeouts = counter("store.timeout")
    with BenchEngine(llm_args(store, **HASTY), kv=kv) as bench:
        started = time.monotonic()
        assert checked(bench) == 0
        assert time.monotonic() - started < 30
        # Nothing is in quarantine: the late bytes go to slots, which are still taken, also once the
        # store's own deadline has passed and nobody waits for the call any more.
        assert not bench.manager._ledger.quarantine
        staging = bench.manager._worker._access.staging
        while counter("store.timeout") == timeouts:
            assert time.monotonic() - started < 60
        assert staging.num_free < staging.num_slots
        kv.pool.fill_(12.5)  # canaries
        store.at_load.open()
        deadline = time.monotonic() + 60
        while staging.num_free < staging.num_slots:
            assert time.monotonic() < deadline, "slots of the late load never came back"
        assert (kv.pool == 12.5).all()


def test_part_of_a_load_that_came_in_time_counts() -> None:
    store = filled()
    keys = list(store.frames)
    real_load = store.load

    async def load(keys_asked, into):
        if keys[4] in keys_asked:
            store.at_load.shut()
        return await real_load(keys_asked, into)

    store.load = load
    # Three slots for loads: pieces of three blocks, one after the other.
    with BenchEngine(llm_args(store, staging_bytes=4 * SLOT, **HASTY)) as bench:
        assert checked(bench) == 3 * T
        store.open_doors()


def test_aborting_a_loading_request_returns_its_blocks_at_once() -> None:
    store = filled()
    store.at_load.shut()
    kv = PlainKv()
    with BenchEngine(llm_args(store), kv=kv) as bench:
        request = bench.submit(PROMPT)
        bench.step()
        store.at_load.await_caller()
        bench.abort(request)
        deadline = time.monotonic() + 60
        while kv.get_num_free_blocks() < len(kv.pool):
            assert time.monotonic() < deadline
            bench.manager.end_step()
        kv.pool.fill_(12.5)
        store.at_load.open()
        staging = bench.manager._worker._access.staging
        while staging.num_free < staging.num_slots:
            assert time.monotonic() < deadline
        assert (kv.pool == 12.5).all()


def test_the_end_of_a_load_wakes_the_engine() -> None:
    store = filled()
    store.at_load.shut()
    with BenchEngine(llm_args(store)) as bench:
        bench.submit(PROMPT, 3)
        bench.step()
        store.at_load.await_caller()
        bench.woken.clear()
        assert bench.manager.wait_seconds() > 10  # it does not poll
        store.at_load.open()
        assert bench.woken.wait(60)
        bench.run()


def test_the_end_of_a_load_needs_no_turn_of_the_loop() -> None:
    store = filled()
    with BenchEngine(llm_args(store)) as bench:
        io = bench.manager._worker._store.io
        [copier] = bench.manager._worker._access.copiers
        stuck, goes_on = threading.Event(), threading.Event()
        copy_in = copier.copy_in

        def copy_while_the_loop_is_stuck(*about: object) -> None:
            io.call_soon(lambda: stuck.set() or goes_on.wait(60))
            assert stuck.wait(60)
            copy_in(*about)

        copier.copy_in = copy_while_the_loop_is_stuck
        request = bench.submit(PROMPT, 3)
        bench.step()
        while not bench.outcomes[-1].loaded:
            bench.sleep()
            bench.step()
        assert stuck.is_set()
        assert not goes_on.is_set()
        goes_on.set()
        bench.run()
        assert request.tokens.view[len(PROMPT) :].tolist() == ANSWER


def test_a_load_that_starts_after_a_cancellation_is_not_cancelled() -> None:
    """The loop has had no turn between the two, and the request may be the same."""
    with BenchEngine(llm_args(DictStore())) as bench:
        loads, io = bench.manager._worker._loads, bench.manager._worker._store.io
        stuck, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
        io.call_soon(lambda: stuck.set() or goes_on.wait(60))
        assert stuck.wait(60)
        loads.cancel(1)
        order = LoadBlocks(1, 0, T, (BlockLoad(BlockKey(b"k" * 32), 0),))
        load = loads.start(order, lambda _: ended.set())
        goes_on.set()
        assert ended.wait(60)
        assert load.failure is not None  # that block is not stored; a cancelled load has none


# ---------------------------------------------------------------------- lookups


def test_all_requests_of_a_step_share_one_lookup_budget() -> None:
    store = filled()
    store.at_lookup.shut()
    with BenchEngine(llm_args(store, lookup_timeout_ms=1000.0), kv=PlainKv(200)) as bench:
        requests = [bench.submit(PROMPT, 1) for _ in range(10)]
        scheduler = bench.manager._scheduler
        started = time.monotonic()
        bench.step()
        elapsed = time.monotonic() - started
        assert 1 <= elapsed < 9  # not ten times the budget
        assert all(request.tokens.view[-1] == ANSWER[0] for request in requests)
        assert (
            scheduler._finding.budget.suspended
        )  # later ones wait no more, until it answers in time
        store.at_lookup.open()


def test_a_late_answer_serves_the_next_admission() -> None:
    store = filled()
    store.at_lookup.shut()
    with BenchEngine(llm_args(store, lookup_timeout_ms=1.0)) as bench:
        request = bench.submit(PROMPT, 3)
        bench.step()
        assert request.num_computed_tokens == len(PROMPT)  # a miss: computed
        state = bench.manager._scheduler._finding._prompts[request.request_id]
        store.at_lookup.open()
        assert state.lookup.exception(60) is None
        answer = bench.manager._scheduler.get_num_new_matched_tokens(request, 0)
        assert answer == (len(PROMPT) - 1, True)
        bench.run()


def test_lookups_start_when_a_request_arrives(store: DictStore) -> None:
    with BenchEngine(llm_args(store)) as bench:
        before = len(store.lookups)
        request = bench.submit(PROMPT)
        state = bench.manager._scheduler._finding._prompts[request.request_id]
        state.lookup.result(60)
        assert len(store.lookups) == before + 1
        bench.run()


def test_nothing_is_waited_for_if_the_device_has_it_all(store: DictStore) -> None:
    store.at_lookup.shut()
    kv = PlainKv()
    kv.device_match = lambda request: request.num_tokens - 1
    with BenchEngine(llm_args(store, lookup_timeout_ms=60_000.0), kv=kv) as bench:
        bench.submit(PROMPT[: 2 * T + 1])
        started = time.monotonic()
        bench.step()
        assert time.monotonic() - started < 50
        store.at_lookup.open()


# ---------------------------------------------------------------------- saves


def test_a_store_that_does_not_save_costs_nothing_but_the_entries() -> None:
    store = DictStore()
    store.save_error = OSError(28, "no space left on device")
    lost = counter("connector.save.lost.blocks")
    with BenchEngine(llm_args(store)) as bench:
        assert checked(bench) == 0
    assert counter("connector.save.lost.blocks") > lost


def test_a_backlog_drops_blocks_and_the_model_does_not_wait() -> None:
    store = DictStore()
    store.at_save.shut()
    dropped = counter("connector.save.dropped.blocks")
    with BenchEngine(llm_args(store, staging_bytes=4 * SLOT)) as bench:
        request = bench.submit(PROMPT, 30)
        while request.num_generated_tokens < 20:
            bench.step()
        assert counter("connector.save.dropped.blocks") > dropped
        # What was dropped is offered again at the end, when there is room.
        store.at_save.open()
        bench.run()
    assert reference(PROMPT, 30) == request.tokens.view[len(PROMPT) :].tolist()
    with BenchEngine(llm_args(store)) as bench:
        assert bench.answer(PROMPT, 30) == reference(PROMPT, 30)
        assert bench.store_tokens[max(bench.requests)] == len(PROMPT) - 1


def test_a_store_that_never_saves_does_not_keep_blocks_for_ever() -> None:
    store = DictStore()
    store.at_save.shut()
    with BenchEngine(llm_args(store, staging_bytes=4 * SLOT, **HASTY)) as bench:
        request = bench.submit(PROMPT, 1)
        bench.run()
        assert bench.kv.get_num_free_blocks() == len(bench.kv.pool)
        assert not bench.manager._ledger.quarantine
        assert request.tokens.view[-1] == ANSWER[0]
        store.open_doors()


def test_slots_of_a_save_past_its_deadline_stay_taken_until_it_ends() -> None:
    """Its store still reads them."""
    store = DictStore()
    store.at_save.shut()
    with BenchEngine(llm_args(store, **HASTY)) as bench:
        bench.submit(PROMPT, 1)
        bench.run()
        staging = bench.manager._worker._access.staging
        assert bench.manager._worker._saves.flush(60)
        assert staging.num_free < staging.num_slots
        store.open_doors()
        until(lambda: staging.num_free == staging.num_slots)


def test_with_wait_nothing_is_dropped() -> None:
    store = DictStore()
    store.at_save.shut()
    dropped = counter("connector.save.dropped.blocks")
    with BenchEngine(llm_args(store, staging_bytes=2 * SLOT, on_backlog="wait")) as bench:

        def open_once_it_waits() -> None:
            store.at_save.await_caller()
            store.at_save.open()

        opener = threading.Thread(target=open_once_it_waits)
        opener.start()
        assert checked(bench) == 0
        opener.join()
    assert counter("connector.save.dropped.blocks") == dropped
    assert len(store.frames) == 11


FINISH = {"on_backlog": "wait", "save_on": "finish", "staging_bytes": 2 * SLOT}
"""The blocks of ended requests find no room in the staging memory."""


def test_with_wait_an_ended_request_waits_for_room_though_lookups_are_late() -> None:
    store = DictStore()
    with BenchEngine(llm_args(store, **FINISH)) as bench:
        bench.submit(PROMPT, 3)
        bench.step()
        bench.manager._scheduler._finding.budget.suspended = True
        bench.run()
    assert len(store.frames) == 11


def test_with_wait_ended_requests_wait_behind_each_other() -> None:
    store = DictStore()
    store.at_save.shut()
    with BenchEngine(llm_args(store, **FINISH)) as bench:
        bench.submit(PROMPT, 1)
        bench.submit([0, *PROMPT], 3)
        for _ in range(6):
            bench.step()
        store.at_save.open()
        bench.run()
    assert len(store.frames) == 11 + 12


def test_all_requests_of_a_step_wait_for_room_together() -> None:
    store = DictStore()
    store.at_save.shut()
    settings = HASTY | {"on_backlog": "wait", "staging_bytes": 2 * SLOT, "save_timeout_s": 1.0}
    with BenchEngine(llm_args(store, **settings), kv=PlainKv(200)) as bench:
        for first in range(8):
            bench.submit([first, *PROMPT], 3)
        started = time.monotonic()
        bench.step()
        assert 0.9 < time.monotonic() - started < 7  # not eight times as long
        store.open_doors()
        bench.run()


# ---------------------------------------------------------------------- start and end


def close_while_saving(bench: BenchEngine, store: DictStore) -> None:
    """Closes the engine while the store answers no save until the engine waits for it."""
    closing = threading.Thread(target=bench.close)
    closing.start()
    store.at_save.await_caller()
    store.at_save.open()
    closing.join(60)
    assert not closing.is_alive()


def test_shutdown_writes_what_is_staged() -> None:
    store = DictStore()
    store.at_save.shut()
    bench = BenchEngine(llm_args(store))
    bench.submit(PROMPT, 1)
    bench.step()
    close_while_saving(bench, store)
    assert len(store.frames) == 11


def test_held_blocks_of_a_request_that_is_not_saved_are_forgotten() -> None:
    store = DictStore()
    store.at_save.shut()
    with BenchEngine(llm_args(store, **FINISH | {"on_backlog": "drop"})) as bench:
        bench.submit(PROMPT, 1)
        bench.submit([0, *PROMPT], 3)
        for _ in range(6):
            bench.step()
        num_held = len(bench.manager._worker._held)
        store.at_save.open()
        bench.run()
    assert (num_held, len(store.frames)) == (0, 11)


def test_blocks_stay_until_the_store_and_the_reader_have_them() -> None:
    with BenchEngine(llm_args(DictStore())) as bench:
        worker = bench.manager._worker
        worker._saved.append(7)
        worker._shared.add(7)
        assert worker.get_finished([], []) == ([], [])
        slots = worker._access.staging.take(Direction.SAVE, 1 << 20)
        worker._leaving[7] = SaveOrder(7, ("a block",)), float("inf")
        worker._publisher = SimpleNamespace(take_ended=lambda: [7])
        assert worker.get_finished([], []) == ([], [])
        worker._publisher = None
        worker._leaving.clear()
        worker._access.staging.give_back(Direction.SAVE, slots)


def test_shutdown_writes_what_waits_behind_the_writes_in_flight() -> None:
    store = DictStore()
    store.at_save.shut()
    bench = BenchEngine(llm_args(store), kv=PlainKv(100))
    for first in range(5):
        bench.submit([first, *PROMPT], 30)
        bench.step()
    close_while_saving(bench, store)
    assert {block.tokens[0] for block in store.blocks if block.parent not in store.frames} == set(
        range(5)
    )


def test_shutdown_writes_what_ended_requests_still_have_in_the_pool() -> None:
    store = DictStore()
    with BenchEngine(llm_args(store, staging_bytes=2 * SLOT)) as bench:
        bench.submit(PROMPT, 1)
        bench.step()
        assert bench.saving
    assert len(store.frames) == 11


@pytest.mark.parametrize("call", ["save", "load"])
def test_shutdown_with_a_store_that_hangs_ends_within_its_deadlines(call: str) -> None:
    store = filled() if call == "load" else DictStore()
    door = getattr(store, f"at_{call}")
    door.shut()
    bench = BenchEngine(llm_args(store, **HASTY))
    bench.submit(PROMPT)
    bench.step()
    door.await_caller()
    started = time.monotonic()
    bench.close()
    assert time.monotonic() - started < 30
    store.open_doors()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            BackendUnavailable("connection refused"),
            "DictStore cannot be opened: connection refused",
        ),
        (ConfigurationError("capacity=1: too small"), "capacity=1: too small"),
        (OSError("no such directory"), "no such directory"),
    ],
)
def test_a_store_that_cannot_be_opened_is_an_error_at_start_up(
    error: Exception, message: str
) -> None:
    store = DictStore()
    store.open_error = error
    with pytest.raises(ConfigurationError, match=message):
        BenchEngine(llm_args(store))


def test_a_store_that_cannot_be_opened_is_named_without_its_password() -> None:
    with pytest.raises(ConfigurationError, match=r"store 'redis\+unix://:\*\*\*@/none'") as caught:
        BenchEngine(llm_args("redis+unix://:secret@/none"))
    assert "secret" not in str(caught.value)


def test_a_store_that_never_opens_is_an_error_within_the_deadline() -> None:
    store = DictStore()

    async def forever(_layouts, **_):
        await store.at_load.pass_through()

    store.at_load.shut()
    store.open = forever
    started = time.monotonic()
    with pytest.raises(ConfigurationError, match="DictStore cannot be opened"):
        BenchEngine(llm_args(store, **HASTY))
    assert time.monotonic() - started < 30
    store.open_doors()


def test_a_load_under_way_is_given_up_when_the_store_is_left_alone() -> None:
    store = filled()
    with BenchEngine(llm_args(store, lookup_timeout_ms=60_000, load_timeout_s=100)) as bench:
        request = bench.submit(PROMPT, 3)
        store.at_load.shut()
        bench.step()
        store.at_load.await_caller()
        slots = bench.manager._worker._access.staging
        taken = slots.num_slots - slots.num_free
        store.lookup_error = OSError("gone")
        started = time.monotonic()
        for token in range(1, 8):
            bench.submit([token] * 3 * T, 1)
        bench.run()
        assert time.monotonic() - started < 60
        assert request.tokens.view[len(PROMPT) :].tolist() == ANSWER
        # What the store may still write into stays its own.
        assert slots.num_slots - slots.num_free == taken > 0
        store.open_doors()


def test_a_load_of_which_nothing_arrives_makes_one_ask(monkeypatch) -> None:
    monkeypatch.setattr("kvconnect.connector.io.load._STALL_S", 0.05)
    monkeypatch.setattr("kvconnect.connector.io.load._PROBE_S", 0.1)
    store = filled()
    with BenchEngine(llm_args(store, lookup_timeout_ms=60_000, load_timeout_s=100)) as bench:
        request = bench.submit(PROMPT, 3)
        store.at_load.shut()
        bench.step()
        store.at_load.await_caller()
        store.at_lookup.shut()  # frozen, and nobody else has to do with it
        started = time.monotonic()
        bench.run()
        assert time.monotonic() - started < 60
        assert request.tokens.view[len(PROMPT) :].tolist() == ANSWER
        store.open_doors()


def test_a_slow_load_from_a_store_that_answers_is_waited_for(monkeypatch) -> None:
    monkeypatch.setattr("kvconnect.connector.io.load._STALL_S", 0.01)
    store = filled()
    with BenchEngine(llm_args(store, lookup_timeout_ms=60_000, load_timeout_s=100)) as bench:
        request = bench.submit(PROMPT, 3)
        store.at_load.shut()
        bench.step()
        store.at_load.await_caller()
        asked = len(store.lookups)
        slow = threading.Timer(1.0, store.open_doors)
        slow.start()
        bench.run()
        slow.join()
        assert len(store.lookups) > asked
        assert request.tokens.view[len(PROMPT) :].tolist() == ANSWER
        assert bench.store_tokens[request.request_id] == len(PROMPT) - 1


def test_opening_is_no_load_and_may_take_longer() -> None:
    store = DictStore()

    async def slow(_layouts, **_):
        await asyncio.sleep(0.1)

    store.open = slow
    with BenchEngine(llm_args(store, load_timeout_s=0.01)) as bench:
        assert bench.answer(PROMPT, 3) == ANSWER
