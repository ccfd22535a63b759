"""Loads that bring the last block first while the engine computes from the first one on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import recording
from bench_engine import BenchEngine, PlainKv, T, llm_args, new_request, reference, sound_blocks
from overlap_engine import OverlapEngine, OverlapKv, OverlapPair, not_loaded
from recording import Script, fail, never
from stores import DictStore
from waiting import until

from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.connector.io.load import Load
from kvconnect.connector.io.orders import BlockLoad, LoadBlocks
from kvconnect.connector.ranks.communicator import Report
from kvconnect.connector.runtime.ledger import TransferLedger
from kvconnect.connector.runtime.reporting import RequestRecord
from kvconnect.connector.runtime.transfers import BlockFate, StepOutcome, Transfer
from kvconnect.errors import ConnectorContractError
from kvconnect.request import LlmRequest, RequestState
from kvconnect.trace import metrics

PROMPT = list(range(1, 6 * T + 3))
ANSWER = reference(PROMPT, 3)
END = 5 * T


def engine(kv: PlainKv | None = None, **settings: object) -> OverlapEngine:
    """An engine with the recorder of this test, whose loads overlap."""
    return OverlapEngine(
        llm_args(recording.config(scheduler="OverlappingRecorder", **settings)), kv=kv
    )


def tokens(request: LlmRequest) -> list[int]:
    return request.tokens.view[request.prompt_len :].tolist()


def bring(bench: OverlapEngine, request: LlmRequest, blocks: range) -> None:
    """What a worker does that brings these blocks of PROMPT."""
    ids = bench.kv.blocks[request.request_id]
    for number in blocks:
        bench.kv.pool[ids[number]] = sound_blocks(PROMPT)[number]


@pytest.fixture(autouse=True)
def a_match(script: Script) -> None:
    """The connector has five blocks, in the background, and nothing ends by itself."""
    script.match = lambda *_: (END, True)
    script.finished = never


# ---------------------------------------------------------------------- a user's connector


def test_a_users_connector_is_met_where_it_has_come_to(script: Script) -> None:
    with engine() as bench:
        request = bench.submit(PROMPT, 3)
        bench.beside = lambda request: min(T, not_loaded(request))
        bench.step()
        assert request.state is RequestState.LOADING
        bring(bench, request, range(3, 5))
        script.progress = {request.request_id: 3 * T}
        bench.step()
        assert (request.num_computed_tokens, request.loaded_from) == (T, 3 * T)
        bench.step()
        script.finished = lambda *_: ([], [request.request_id])
        bench.step()
        script.finished, script.progress = never, {}
        assert (request.num_computed_tokens, bench.store_tokens[request.request_id]) == (END, 2 * T)
        bench.run()
        assert tokens(request) == ANSWER
        # It was in the report of each step that computed, and once among those that load.
        assert [len(one.loading_requests) for one in script.outputs[:4]] == [1, 0, 0, 0]
        positions = [
            (data.computed_position, data.num_scheduled_tokens)
            for output in script.outputs[1:5]
            for data in (*output.new_requests, *output.cached_requests)
        ]
        assert positions == [(0, T), (T, T), (2 * T, T), (END, len(PROMPT) - END)]
        assert len(script.outputs[1].new_requests) == 1
        assert script.named("load_overlaps") == [(request.request_id,)]
        assert script.named("load_failed") == []


def test_what_is_computed_when_nothing_comes_is_not_waited_for(script: Script) -> None:
    with engine() as bench:
        request = bench.submit(PROMPT, 3)
        bench.step()
        bench.step()
        assert request.num_computed_tokens == END
        # Nothing is left to bring: a worker that keeps the contract ends its load.
        script.finished = lambda *_: ([], [request.request_id])
        bench.step()
        script.finished = never
        bench.run()
        assert tokens(request) == ANSWER
        assert bench.store_tokens[request.request_id] == 0


@pytest.mark.parametrize("reason", ["scheduler", "setting", "manager", "synchronous"])
def test_one_that_does_not_overlap_is_asked_and_told_as_before(script: Script, reason: str) -> None:
    """It sees no request whose load runs, and nothing is computed."""
    scheduler = "Recorder" if reason == "scheduler" else "OverlappingRecorder"
    settings = {"overlap_loads": False} if reason == "setting" else {}
    kv = PlainKv() if reason == "manager" else OverlapKv()
    args = llm_args(recording.config(scheduler=scheduler, **settings))
    if reason == "synchronous":
        script.match = lambda *_: (END, False)
    with OverlapEngine(args, kv=kv) as bench:
        request = bench.submit(PROMPT, 3)
        bench.step()
        assert request.load_end == 0
        if reason == "synchronous":
            assert request.num_computed_tokens == len(PROMPT)
            return
        bench.step()
        assert request.state is RequestState.LOADING
        assert request.num_computed_tokens == 0
        bring(bench, request, range(5))
        script.finished = lambda *_: ([], [request.request_id])
        bench.step()
        script.finished = never
        bench.run()
        assert tokens(request) == ANSWER
        assert [len(one.new_requests) for one in script.outputs[:2]] == [0, 1]


# ---------------------------------------------------------------------- what workers may report


@pytest.mark.parametrize(
    ("progress", "told"),
    [
        *((None, ""), ([1], ""), ({1: "8"}, ""), ({"1": 8}, ""), ({1: 8.0}, "")),
        *(({True: 8}, ""), ({1: True}, ""), (((1, 8),), "")),
        *((at, f" reported {at} .* from 0 to {END}") for at in (-1, END + 1, 10**9)),
        ({10**9: T}, " .* has no load beside its computing"),
    ],
)
def test_progress_that_cannot_be_names_the_class(
    script: Script, progress: object, told: str
) -> None:
    with engine() as bench:
        request = bench.submit(PROMPT)
        script.progress = {request.request_id: progress} if type(progress) is int else progress
        error = rf"RecordingWorker\.get_load_progress{told}"
        with pytest.raises(ConnectorContractError, match=error):
            bench.step()


def test_progress_before_the_start_of_the_load_names_the_class(script: Script) -> None:
    kv = OverlapKv()
    kv.device_match = lambda _: 2 * T
    with engine(kv) as bench:
        request = bench.submit(PROMPT)
        script.progress = {request.request_id: 2 * T - 1}
        with pytest.raises(ConnectorContractError, match=f"the load from {2 * T} to"):
            bench.step()


def test_progress_that_grows_names_the_class(script: Script) -> None:
    with engine() as bench:
        request = bench.submit(PROMPT)
        bench.beside = lambda _: 0
        script.progress = {request.request_id: 3 * T}
        bench.step()
        script.progress = {request.request_id: 3 * T + 1}
        with pytest.raises(ConnectorContractError, match=f"has reached {3 * T}"):
            bench.idle_step()


def test_progress_of_a_load_that_does_not_overlap_names_the_class(script: Script) -> None:
    with OverlapEngine(llm_args(recording.config())) as bench:
        request = bench.submit(PROMPT)
        script.progress = {request.request_id: T}
        with pytest.raises(ConnectorContractError, match="no load beside its computing"):
            bench.step()


def test_progress_of_a_cancelled_load_is_no_news(script: Script) -> None:
    with engine() as bench:
        request = bench.submit(PROMPT)
        bench.step()
        bench.abort(request)
        script.progress = {request.request_id: T}
        bench.idle_step()
        script.finished = lambda *_: ([], [request.request_id])
        bench.idle_step()
        assert bench.kv.all_free()


# ---------------------------------------------------------------------- loads that fail


@pytest.mark.parametrize("is_late", [True, False])
def test_a_load_that_may_still_write_keeps_what_was_computed_and_exchanges_the_rest(
    script: Script, is_late: bool
) -> None:
    kv = OverlapKv(20)
    with engine(kv) as bench:
        request = bench.submit(PROMPT, 3)
        bench.beside = lambda request: min(2 * T - request.num_computed_tokens, T)
        for _ in range(3):
            bench.step()
        old = list(kv.blocks[request.request_id])
        if is_late:
            script.progress = {request.request_id: 4 * T}
            bench.manager._ledger.loads.get(request.request_id).deadline = 0.0
        else:
            # What the worker calls valid from the beginning on is not: only the end may be.
            script.failures = [fail(request, 4 * T, ended=False)]
        bench.idle_and_settle()
        assert bench.outcomes[-1].failed == {request.request_id: 2 * T}
        fresh = kv.blocks[request.request_id]
        assert fresh[:2] == old[:2]
        assert not set(fresh[2:]) & set(old)
        assert script.named("load_failed") == [(request.request_id, 2 * T)]
        assert ("cancel", request.request_id) in script.calls
        kv.pool[old[2:]] = 666.0  # the late writer
        bench.run()
        assert tokens(request) == ANSWER
        assert bench.store_tokens[request.request_id] == 0
        script.finished = lambda *_: ([], [request.request_id])
        bench.idle_step()
        assert kv.all_free()


@pytest.mark.parametrize("computed", [0, 1, 3])
@pytest.mark.parametrize("came", [0, 1, 2])
def test_a_failed_load_whose_writes_ended_is_used_as_far_as_it_came(
    script: Script, computed: int, came: int
) -> None:
    with engine() as bench:
        request = bench.submit(PROMPT, 3)
        bench.beside = lambda request: T if request.num_computed_tokens < computed * T else 0
        for _ in range(1 + computed):
            bench.step()
        bring(bench, request, range(5 - came, 5))
        script.progress = {request.request_id: (5 - came) * T}
        script.failures = [fail(request, 0)]
        bench.idle_and_settle()
        script.progress = {}
        assert bench.outcomes[-1].loaded_from == {request.request_id: (5 - came) * T}
        assert script.named("load_failed") == [(request.request_id, 0)]
        bench.run()
        assert tokens(request) == ANSWER
        assert bench.store_tokens[request.request_id] == came * T
        assert bench.kv.all_free()


# ---------------------------------------------------------------------- loads that are cancelled


def test_aborting_beside_a_load_holds_its_blocks_until_it_ends(script: Script) -> None:
    kv = OverlapKv(20)
    with engine(kv) as bench:
        request = bench.submit(PROMPT)
        bench.beside = lambda _: T
        bench.step()
        bench.step()
        bench.abort(request)
        assert request.state is RequestState.FINISHED
        assert kv.get_num_free_blocks() == 20 - 7
        script.finished = lambda *_: ([], [request.request_id])
        bench.idle_step()
        assert kv.all_free()


def test_after_a_preemption_it_loads_anew_once_the_first_load_ended(script: Script) -> None:
    with engine(max_quarantined_fraction=1.0) as bench:
        request = bench.submit(PROMPT, 3)
        bench.beside = lambda request: T if request.num_computed_tokens < T else 0
        bench.step()
        script.progress = {request.request_id: 4 * T}
        bench.step()
        bench.preempt(request)
        bench.beside = lambda _: 0
        bench.kv.pool.fill_(6.66)
        script.progress = {}
        script.finished = lambda *_: ([], [request.request_id])
        bench.idle_step()
        script.finished = never
        bench.step()
        assert (request.state, request.loaded_from) == (RequestState.LOADING, END)
        bring(bench, request, range(5))
        script.progress = {request.request_id: 0}
        script.finished = lambda *_: ([], [request.request_id])
        bench.step()
        script.progress, script.finished = {}, never
        bench.run()
        assert tokens(request) == ANSWER
        assert len(script.named("load_overlaps")) == 2
        assert bench.store_tokens[request.request_id] == END


def test_while_the_cancelled_load_runs_it_is_computed_alone(script: Script) -> None:
    with engine(max_quarantined_fraction=1.0) as bench:
        request = bench.submit(PROMPT, 3)
        bench.beside = lambda _: T
        bench.step()
        bench.step()
        bench.preempt(request)
        script.progress = {request.request_id: 3 * T}  # of the first load
        bench.run()
        assert tokens(request) == ANSWER
        assert sum(len(output.loading_requests) for output in script.outputs) == 1
        script.progress = {}


# ---------------------------------------------------------------------- several ranks: the ledger


class Book:
    """A ledger of two ranks with one load of the tokens 0 to END that overlaps."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        self.kv = OverlapKv()
        self.request = new_request(1, PROMPT)
        self.kv.held[1] = [list(range(7))]
        self.kv.references[0].update(range(7))
        self.cancelled: list[frozenset[int]] = []
        self.failed: list[tuple[int, BlockFate]] = []
        self.ledger = TransferLedger(
            self.kv,
            self,
            {1: RequestRecord(self.request, holds_blocks=True)},
            KvCacheConnectorConfig(url="memory:", load_timeout_s=timeout_s),
            worker_name="Worker",
            num_ranks=2,
            tokens_per_block=T,
            divisible=True,
        )
        self.request.load_end = self.request.loaded_from = END
        self.ledger.start_load(1, 0, END, is_async=True, overlaps=True)

    def cancel(self, _request: LlmRequest, ranks: frozenset[int]) -> None:
        self.cancelled.append(ranks)

    def settle(self, *reports: Report, late: bool = False) -> StepOutcome:
        outcome = StepOutcome()
        self.ledger.check(reports)
        self.ledger.settle(reports, self._load_failed, outcome, time.monotonic() + 1e6 * late)
        return outcome

    def _load_failed(self, _record: RequestRecord, num_valid: int, fate: BlockFate) -> None:
        self.failed.append((num_valid, fate))


def report(position: int | None = None, *, done: bool = False, fails: bool | None = None) -> Report:
    """One rank's; `fails`: whether its writes have ended."""
    failure = TransferFailure(1, Direction.LOAD, 0, "planted", writes_ended=bool(fails))
    return Report(
        1,
        loaded=(1,) if done else (),
        progress=() if position is None else ((1, position),),
        failures=() if fails is None else (failure,),
    )


def test_tokens_are_loaded_once_every_rank_has_them() -> None:
    book = Book()
    book.settle(report(2 * T), report())
    assert book.request.loaded_from == END
    book.settle(report(T), report(3 * T))
    assert book.request.loaded_from == 3 * T
    assert not book.settle(report(T, done=True), report(2 * T)).loaded
    assert book.request.loaded_from == 2 * T
    outcome = book.settle(report(), report(2 * T, done=True))
    assert (outcome.loaded, outcome.loaded_from) == ({1: END}, {1: 2 * T})
    assert not book.ledger.loads
    assert book.failed == []


def test_a_rank_that_failed_and_writes_no_more_leaves_the_others_to_their_end() -> None:
    book = Book()
    outcome = book.settle(report(4 * T, fails=True), report(3 * T))
    assert (outcome.loaded, outcome.failed, book.failed) == ({}, {}, [])
    assert book.request.loaded_from == 4 * T
    outcome = book.settle(report(), report(0, done=True))
    assert (outcome.loaded_from, outcome.failed) == ({1: 4 * T}, {})
    assert book.failed == [(0, BlockFate.KEPT)]
    assert book.cancelled == []
    # What comes of it later is no news.
    book.settle(report(done=True), report())


@pytest.mark.parametrize("computed", [0, T, 2 * T + 1])
def test_a_rank_that_failed_and_still_writes_costs_what_is_not_computed(computed: int) -> None:
    book = Book()
    book.request.num_computed_tokens = computed
    outcome = book.settle(report(T, fails=False), report(2 * T, done=True))
    kept = computed - computed % T
    assert (outcome.failed, outcome.loaded) == ({1: kept}, {})
    assert book.failed == [(kept, BlockFate.EXCHANGED)]
    assert book.cancelled == [{0}]  # the other has ended its load
    ids = book.kv.blocks[1]
    assert ids[: kept // T] == list(range(kept // T))
    assert min(ids[kept // T :]) >= 7
    assert book.ledger.quarantine.num_blocks == 7 - kept // T
    book.settle(report(done=True), report())
    assert book.ledger.quarantine.num_blocks == 0


def test_a_late_rank_costs_what_is_not_computed_whatever_the_other_has() -> None:
    book = Book()
    book.request.num_computed_tokens = 2 * T
    assert not book.settle(report(3 * T), report(0, done=True)).failed
    outcome = book.settle(report(), report(), late=True)
    assert outcome.failed == {1: 2 * T}
    assert book.failed == [(2 * T, BlockFate.EXCHANGED)]
    assert book.cancelled == [{0}]


def test_a_load_that_ended_on_all_ranks_is_not_late() -> None:
    book = Book()
    outcome = book.settle(report(T, done=True), report(T, done=True), late=True)
    assert (outcome.loaded_from, outcome.failed) == ({1: T}, {})


# ---------------------------------------------------------------------- the floor of one load


def order(start: int, end: int) -> LoadBlocks:
    numbers = range(start // T, -(-end // T))
    blocks = tuple(BlockLoad(bytes([one]), one, 0, None, one) for one in reversed(numbers))
    return LoadBlocks(1, start, end, blocks, overlaps=True)


@pytest.mark.parametrize("end", [END, END - 1, END - T + 1])
@pytest.mark.parametrize("start", [0, 2 * T])
def test_the_first_loaded_token_follows_from_the_blocks_that_are_there(
    start: int, end: int
) -> None:
    one = order(start, end)
    positions = [one.loaded_from(count, T) for count in range(len(one.blocks) + 1)]
    assert positions == [end, *range(4 * T, start - 1, -T)]


@pytest.mark.parametrize("end", [END, END - 1])
def test_blocks_with_a_token_before_the_floor_are_not_wanted(end: int) -> None:
    for floor in range(end + 1):
        load = Load(order(0, end), print)
        load.raise_floor(floor, T)
        wanted = [block.block_id for block in load.order.blocks[: load.wanted]]
        assert wanted == [one for one in (4, 3, 2, 1, 0) if one * T >= floor]


def test_a_load_is_complete_once_all_blocks_from_the_floor_on_are_there() -> None:
    load = Load(order(2 * T, END), print)
    load.raise_floor(T, T)  # above what is loaded
    assert load.wanted == 3
    load.copied[:1] = b"\1"
    assert not load.complete
    load.raise_floor(3 * T + 1, T)
    load.raise_floor(T, T)  # it never sinks
    assert (load.wanted, load.complete) == (1, True)


# ---------------------------------------------------------------------- the built-in pair


@pytest.fixture
def filled() -> Iterator[DictStore]:
    """A store that has the prompt."""
    store = DictStore()
    with BenchEngine(llm_args(store)) as bench:
        bench.answer(PROMPT, 3)
    yield store
    store.open_doors()


def lose_at_load(store: DictStore, keys: set[bytes]) -> None:
    """The store loses the blocks of `keys` after it was asked for them, before each load."""
    real = store.load

    def load_what_is_left(asked: list[bytes], into: object) -> object:
        for key in keys:
            store.frames.pop(key, None)
        return real(asked, into)

    store.load = load_what_is_left  # type: ignore[method-assign]


class Copies:
    """The copies into the pool of an engine; a test may hold them."""

    def __init__(self, bench: OverlapEngine) -> None:
        self.held = threading.Event()
        self.held.set()
        self.begun = threading.Semaphore(0)
        self.ids: list[int] = []
        self.running = 0
        [copier] = bench.manager._worker._access.copiers
        self._copy_in = copier.copy_in
        copier.copy_in = self

    def __call__(self, slots: list[object], block_ids: list[int]) -> None:
        self.running += 1
        self.begun.release()
        assert self.held.wait(60)
        self._copy_in(slots, block_ids)
        self.ids += block_ids
        self.running -= 1


def one_block_a_call(bench: OverlapEngine) -> None:
    bench.manager._worker._access.call_blocks = 1


def test_a_step_waits_for_a_copy_that_is_running_and_no_later_one_is_below_it(
    filled: DictStore,
) -> None:
    filled.at_load.shut()
    with OverlapEngine(llm_args(filled)) as bench, ThreadPoolExecutor(1) as thread:
        copies = Copies(bench)
        copies.held.clear()
        request = bench.submit(PROMPT, 3)
        bench.step()
        ids = list(bench.kv.blocks[request.request_id])
        filled.at_load.open()
        assert copies.begun.acquire(timeout=60)
        bench.beside = lambda _: 3 * T
        step = thread.submit(bench.step)
        with pytest.raises(TimeoutError):
            step.result(0.2)  # it computes nothing while blocks may still be written
        assert request.num_computed_tokens == 0
        assert bench.kv.pool[ids[0]].unique().numel() == 1
        copies.held.set()
        step.result(60)
        before = len(copies.ids)
        assert request.num_computed_tokens >= 3 * T
        bench.beside = not_loaded
        bench.run()
        assert not set(copies.ids[before:]) & set(ids[:3])
        assert tokens(request) == ANSWER


def test_what_arrives_after_the_floor_was_raised_is_not_copied_below_it(
    filled: DictStore,
) -> None:
    filled.at_load.shut()
    with OverlapEngine(llm_args(filled)) as bench:
        one_block_a_call(bench)
        copies = Copies(bench)
        request = bench.submit(PROMPT, 3)
        bench.step()
        filled.at_load.await_caller()
        ids = list(bench.kv.blocks[request.request_id])
        bench.beside = lambda request: T if request.num_computed_tokens < 3 * T else 0
        for _ in range(3):
            bench.step()
        filled.at_load.open()
        while not bench.outcomes[-1].loaded:
            if not bench.step():
                bench.sleep()
        # A prompt of 26 tokens: up to the 25th are loaded, in blocks 3 to 6.
        assert sorted(copies.ids) == sorted(ids[3:])
        assert bench.outcomes[-1].loaded_from == {request.request_id: 3 * T}
        bench.run()
        assert tokens(request) == ANSWER
        assert bench.store_tokens[request.request_id] == len(PROMPT) - 1 - 3 * T


def test_a_load_that_is_met_ends_though_its_store_hangs_and_its_slots_come_back(
    filled: DictStore,
) -> None:
    filled.at_load.shut()
    kv = OverlapKv()
    with OverlapEngine(llm_args(filled), kv=kv) as bench:
        request = bench.submit(PROMPT, 3)
        bench.step()
        filled.at_load.await_caller()
        bench.run()
        assert tokens(request) == ANSWER
        assert bench.store_tokens[request.request_id] == 0
        assert kv.all_free()
        assert not bench.manager._ledger.quarantine
        worker = bench.manager._worker
        assert not worker._loads._overlapping
        assert not bench.manager._scheduler._overlapping
        staging = worker._access.staging
        assert staging.num_free < staging.num_slots
        kv.pool.fill_(12.5)  # canaries
        filled.at_load.open()
        until(lambda: staging.num_free == staging.num_slots)
        assert (kv.pool == 12.5).all()


def test_a_load_that_failed_is_saved_anew(filled: DictStore) -> None:
    lost = list(filled.frames)[4]
    frame = filled.frames[lost]
    lose_at_load(filled, {lost})
    with OverlapEngine(llm_args(filled)) as bench:
        one_block_a_call(bench)
        request = bench.submit(PROMPT, 3)
        bench.beside = lambda _: 0
        bench.run()
        assert tokens(request) == ANSWER
        assert bench.store_tokens[request.request_id] == len(PROMPT) - 1 - 5 * T
        bench.manager._worker._queue.flush(60)
    assert (filled.frames[lost] == frame).all()


def test_calls_go_from_the_end_to_the_beginning_and_each_reads_forwards(
    store: DictStore,
) -> None:
    prompt = list(range(40 * T + 1))
    with BenchEngine(llm_args(store)) as bench:
        bench.answer(prompt)
    keys = list(store.frames)
    with OverlapEngine(llm_args(store)) as bench:
        bench.beside = lambda _: 0
        assert bench.answer(prompt) == reference(prompt)
    assert [key for call in reversed(store.loads) for key in call] == keys[:40]
    assert 2 < len(store.loads) < 40


def test_a_load_with_nothing_beside_makes_few_calls(store: DictStore) -> None:
    prompt = list(range(40 * T + 1))
    with BenchEngine(llm_args(store)) as bench:
        bench.answer(prompt)
    calls = []
    for alone in (False, True):
        store.loads.clear()
        with OverlapEngine(llm_args(store)) as bench:
            bench.beside = lambda _: 0
            request = bench.submit(prompt)
            request.loads_alone = alone
            bench.run()
            assert tokens(request) == reference(prompt)
        calls.append(len(store.loads))
    assert calls[0] > 3 * calls[1]


def test_a_call_that_lacks_a_block_brings_none(store: DictStore) -> None:
    """It has read the ones before the missing block, which are of no use."""
    prompt = list(range(40 * T + 1))
    with BenchEngine(llm_args(store)) as bench:
        bench.answer(prompt)
    whole, lost = dict(store.frames), set[bytes]()
    lose_at_load(store, lost)
    for key in list(whole)[30:34]:
        store.frames = dict(whole)
        lost.clear()
        lost.add(key)
        with OverlapEngine(llm_args(store)) as bench:
            bench.beside = lambda _: 0
            request = bench.submit(prompt)
            bench.run()
            assert tokens(request) == reference(prompt)
            assert 0 < bench.store_tokens[request.request_id] <= 40 * T - 31 * T


def test_no_floor_is_sent_for_a_request_that_does_not_compute(filled: DictStore) -> None:
    metas = []
    with OverlapEngine(llm_args(filled)) as bench:
        worker = bench.manager._worker
        bind = worker.bind_connector_meta
        worker.bind_connector_meta = lambda meta: metas.append(meta) or bind(meta)
        filled.at_load.shut()
        request = bench.submit(PROMPT, 3)
        bench.beside = lambda request: T if request.num_computed_tokens < 2 * T else 0
        for _ in range(3):
            bench.step()
        floors = [dict(meta.floors) for meta in metas if meta is not None]
        assert floors == [{}, {request.request_id: T}, {request.request_id: 2 * T}]
        filled.at_load.open()
        bench.run()
        # Behind the end of the load it is raised once, and then no more.
        behind = [one for meta in metas if meta for one in meta.floors.values() if one > END]
        assert len(behind) <= 1
        assert not bench.manager._scheduler._overlapping


@pytest.mark.parametrize("slow", [0, 1])
def test_ranks_of_different_progress_agree_on_the_slower(slow: int) -> None:
    stores = [DictStore(), DictStore()]
    with OverlapPair(stores) as pair:
        pair.submit(PROMPT, 3)
        pair.run()
        pair.flush()
    stores[slow].at_load.shut()
    with OverlapPair(stores) as pair:
        request = pair.leader.requests[pair.submit(PROMPT, 3)]
        pair.leader.beside = lambda _: 0
        pair.step()
        stores[slow].at_load.await_caller()
        pair.leader.beside = lambda request: T if request.num_computed_tokens < 2 * T else 0
        pair.step(3)
        assert request.num_computed_tokens == 2 * T
        assert request.loaded_from == len(PROMPT) - 1
        stores[slow].at_load.open()
        pair.leader.beside = not_loaded
        pair.run()
        assert pair.answer(request.request_id) == [ANSWER, ANSWER]
        pair.flush()
        pair.nothing_is_left()


def test_a_rank_whose_store_fails_costs_what_it_lacks_and_no_more() -> None:
    stores = [DictStore(), DictStore()]
    with OverlapPair(stores) as pair:
        pair.submit(PROMPT, 3)
        pair.run()
        pair.flush()
    gone = list(stores[1].frames)[3]
    lose_at_load(stores[1], {gone})
    with OverlapPair(stores) as pair:
        for worker in pair.workers:
            worker._access.call_blocks = 1
        request = pair.leader.requests[pair.submit(PROMPT, 3)]
        pair.leader.beside = lambda _: 0
        pair.run()
        assert pair.answer(request.request_id) == [ANSWER, ANSWER]
        assert pair.leader.store_tokens[request.request_id] == len(PROMPT) - 1 - 4 * T
        pair.flush()
        pair.nothing_is_left()
    assert gone in stores[1].frames


def test_blocks_that_came_and_were_computed_all_the_same_are_not_missing(
    filled: DictStore,
) -> None:
    name = "connector.load.blocks.missing"
    before = metrics.snapshot().get(name, 0)
    keys = list(filled.frames)
    real = filled.load

    async def load(asked: list[bytes], into: list[object]) -> int:
        if keys[0] in asked:
            filled.at_load.shut()
            await filled.at_load.pass_through()
        return await real(asked, into)

    filled.load = load  # type: ignore[method-assign]
    with OverlapEngine(llm_args(filled)) as bench:
        one_block_a_call(bench)
        request = bench.submit(PROMPT, 3)
        bench.beside = lambda _: 0
        bench.step()
        filled.at_load.await_caller()  # all others have come, or will
        while request.loaded_from > T:
            bench.idle_and_settle()
        bench.beside = lambda request: 0 if request.num_computed_tokens else 3 * T
        bench.run()
        filled.at_load.open()
        assert tokens(request) == ANSWER
        assert bench.store_tokens[request.request_id] == len(PROMPT) - 1 - 3 * T
    assert metrics.snapshot().get(name, 0) == before


def test_a_head_counts_once_every_rank_has_it() -> None:
    load = Transfer(1, Direction.LOAD, None, heads={0: 8, 1: 4})
    assert (load.head(2), load.head(3)) == (4, 0)
