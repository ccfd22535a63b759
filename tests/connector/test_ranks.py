"""Several ranks: success is what all agree on, failure what one says, and nobody waits alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import pytest
import recording
from bench_engine import BenchEngine, PlainKv, T, llm_args
from bench_rank import BenchRank
from ranks import PROMPT, Meeting, Rank
from recording import Recorder, RecordingWorker, never

from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.connector.ranks.communicator import Report, SingleProcess, agreed
from kvconnect.connector.runtime.ledger import TransferLedger
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.connector.runtime.rank import RankOrders
from kvconnect.connector.runtime.reporting import RequestRecord
from kvconnect.connector.runtime.request_errors import RequestErrors
from kvconnect.connector.runtime.transfers import StepOutcome, Transfers
from kvconnect.errors import ConnectorContractError, RankDivergence
from kvconnect.request import LlmRequest


class Ranks:
    """An engine on the leader and a rank beside it, in two threads, each with its own worker."""

    def __init__(self, **settings: object) -> None:
        self.meeting = Meeting(2)
        self.scripts = [recording.fresh_script() for _ in range(2)]
        self.threads = ThreadPoolExecutor(2)
        args = llm_args(recording.config(**settings))
        recording.script = self.scripts[0]
        self.leader = BenchEngine(args, communicator=Rank(self.meeting, 0))
        recording.script = self.scripts[1]
        self.other = BenchRank(args, Rank(self.meeting, 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leader.manager.shutdown()
        self.threads.shutdown()

    def _together(self, lead: Callable[[], Any]) -> list[Any]:
        return [one.result(60) for one in [*map(self.threads.submit, (lead, self.other.step))]]

    def step(self) -> StepOutcome:
        self._together(self.leader.step)
        return self.leader.outcomes[-1]

    def idle_step(self) -> StepOutcome:
        outcome: StepOutcome = self._together(self.leader.idle_step)[0]
        return outcome

    def errors(self, lead: Callable[[], Any] | None = None) -> list[Exception | None]:
        """What each rank raises in a step."""
        calls = (lead or self.leader.step, self.other.step)
        return [one.result(60) for one in [self.threads.submit(raised_by, do) for do in calls]]


def raised_by(run: Callable[[], object]) -> Exception | None:
    try:
        run()
    except Exception as error:  # noqa: BLE001 (whatever it is)
        return error
    return None


def test_blocks_stay_until_the_last_rank_has_saved_them() -> None:
    with Ranks() as ranks:
        request_id = ranks.leader.submit(PROMPT).request_id
        for script in ranks.scripts:
            script.keep = lambda _: True
            script.finished = never
        ranks.step()
        assert ranks.leader.kv.blocks
        ranks.idle_step()
        ranks.scripts[0].finished = lambda *_: ([request_id], [])
        assert ranks.idle_step().saved == []
        ranks.scripts[0].finished = never
        assert ranks.idle_step().saved == []
        ranks.scripts[1].finished = lambda *_: ([request_id], [])
        assert ranks.idle_step().saved == [request_id]


def test_a_step_has_two_exchanges_with_or_without_a_batch() -> None:
    with Ranks() as ranks:
        ranks.leader.submit(PROMPT)
        ranks.scripts[0].keep = lambda _: True
        barriers_per_exchange = 2
        ranks.step()
        assert ranks.meeting.exchanges == 2 * barriers_per_exchange
        ranks.idle_step()
        assert ranks.meeting.exchanges == 4 * barriers_per_exchange


def test_what_the_leader_does_not_keep_is_free_at_once() -> None:
    with Ranks() as ranks:
        ranks.leader.submit(PROMPT)
        ranks.step()
        assert not ranks.leader.kv.blocks
        assert ranks.leader.manager.wait_seconds() is None
        assert [script.named("get_finished") for script in ranks.scripts] == [[([], [])]] * 2


def test_only_the_leader_has_a_scheduler() -> None:
    with Ranks() as ranks:
        assert isinstance(ranks.scripts[0].scheduler, Recorder)
        assert ranks.scripts[1].scheduler is None
        assert isinstance(ranks.scripts[1].worker, RecordingWorker)


def test_a_contract_that_any_rank_broke_ends_all() -> None:
    with Ranks() as ranks:
        ranks.scripts[1].finished = lambda *_: ([], [4711])
        broken, _ = ranks.errors(ranks.leader.idle_step)
        assert isinstance(broken, ConnectorContractError)
        assert "RecordingWorker.get_finished returned request 4711 as loaded" in str(broken)
        _, told = ranks.errors(lambda: None)
        assert isinstance(told, ConnectorContractError)
        assert str(told) == f"rank 0: ConnectorContractError: {broken}"


@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_in_different_steps_all_raise_at_once(ahead: int) -> None:
    with Ranks() as ranks:
        [ranks.leader.manager._rank, ranks.other.driver][ahead].number += 1
        errors = ranks.errors(ranks.leader.idle_step)
        assert [type(one) for one in errors] == [RankDivergence, RankDivergence]


STEP_METHODS = ["bind_connector_meta", "start_load_kv", "wait_for_layer_load", "save_kv_layer"]
STEP_METHODS += ["wait_for_save", "get_finished", "get_failed", "build_worker_meta"]


def planted(*_: object) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", STEP_METHODS)
def test_what_a_worker_raises_ends_the_step_on_all_ranks(method: str, rank: int) -> None:
    with Ranks() as ranks:
        ranks.leader.submit(PROMPT)
        setattr(ranks.scripts[rank].worker, method, planted)
        errors = ranks.errors()
        assert str(errors[rank]) == "planted"
        other = errors[1 - rank]
        assert isinstance(other, ConnectorContractError)
        assert str(other) == f"rank {rank}: RuntimeError: planted"


@pytest.mark.parametrize("idle", [False, True])
def test_what_the_leaders_scheduler_raises_ends_the_step_on_all_ranks(idle: bool) -> None:
    with Ranks() as ranks:
        ranks.leader.submit(PROMPT)
        ranks.scripts[0].meta = planted
        ranks.scripts[0].scheduler.build_idle_meta = planted  # type: ignore[union-attr]
        errors = ranks.errors(ranks.leader.idle_step if idle else ranks.leader.step)
        assert str(errors[0]) == "planted"
        assert isinstance(errors[1], ConnectorContractError)
        assert str(errors[1]) == "rank 0: RuntimeError: planted"


def after_a_failed_load(ranks: Ranks, rank: int, method: str) -> list[Exception | None]:
    """Two steps, in the first of which `method` of `rank` raises; what each rank raises."""
    request = ranks.leader.submit(PROMPT)
    broken = ranks.scripts[rank]
    setattr(broken.worker if method == "cancel" else broken.scheduler, method, planted)
    ranks.scripts[0].match = lambda *_: (2 * T, False)
    for script in ranks.scripts:
        failure = TransferFailure(request.request_id, Direction.LOAD, writes_ended=False)
        script.failures = [failure]
    ranks.leader._raise_first = lambda: None  # type: ignore[method-assign]
    first = ranks.errors()
    assert request.num_tokens == len(PROMPT)
    second = ranks.errors(ranks.leader.idle_step if first[0] is None else lambda: None)
    return [one or other for one, other in zip(first, second, strict=True)]


def test_what_is_raised_after_the_second_exchange_ends_all_ranks_in_the_next() -> None:
    with Ranks() as ranks:
        errors = after_a_failed_load(ranks, 0, "update_from_workers")
        assert str(errors[0]) == "planted"
        assert isinstance(errors[1], ConnectorContractError)
        assert str(errors[1]) == "rank 0: RuntimeError: planted"


@pytest.mark.parametrize(
    ("rank", "method"),
    [(0, "load_failed"), (0, "blocks_replaced"), (0, "cancel"), (1, "cancel")],
)
def test_what_any_rank_raises_for_one_request_the_leader_takes(rank: int, method: str) -> None:
    with Ranks() as ranks:
        assert after_a_failed_load(ranks, rank, method) == [None, None]
        [error] = ranks.leader.manager.take_errors().values()
        if rank == 0:
            assert str(error) == "planted"
        else:
            assert isinstance(error, ConnectorContractError)
            assert str(error) == "rank 1: RuntimeError: planted"
        ranks.idle_step()  # each is told once
        assert ranks.leader.manager.take_errors() == {}


def test_a_load_is_cancelled_on_those_ranks_that_have_not_ended_it() -> None:
    with Ranks() as ranks:
        request = ranks.leader.submit(PROMPT, 3)
        ranks.scripts[0].match = lambda *_: (2 * T, True)
        ranks.scripts[1].finished = never
        ranks.step()
        failure = TransferFailure(request.request_id, Direction.LOAD, writes_ended=False)
        ranks.scripts[1].failures = [failure]
        assert ranks.idle_step().failed == {request.request_id: 0}
        ranks.idle_step()
        assert [script.named("cancel") for script in ranks.scripts] == [[], [(request.request_id,)]]


def test_workers_have_read_the_blocks_of_a_request_that_is_reset_before_a_step_begins() -> None:
    with Ranks() as ranks:
        request = ranks.leader.submit(PROMPT, 3)
        ranks.step()
        orders: list[list[object]] = [[], []]
        for script, order in zip(ranks.scripts, orders, strict=True):
            assert script.worker is not None
            script.worker.request_reset = lambda *args, order=order: order.append(args)  # type: ignore[method-assign]
            script.worker.bind_connector_meta = order.append  # type: ignore[method-assign]
        ranks.leader.preempt(request)
        reset = (request.request_id, len(PROMPT))
        assert orders == [[reset], []]  # the other one hears of it with the next step
        ranks.step()
        assert orders == [[reset, "meta"]] * 2


def test_reports_of_different_steps_are_refused() -> None:
    class Mixed(SingleProcess):
        size = 2

        def allgather(self, value: Any) -> list[Any]:
            return [value, Report(value.step + 1)]

    with pytest.raises(RankDivergence, match=r"step 3.*\[3, 4\]"):
        agreed(Mixed(), Report(3))


# ---------------------------------------------------------------------- the ledger, for n ranks


@pytest.fixture
def bench() -> Any:
    recording.fresh_script()
    with BenchEngine(llm_args(recording.config())) as bench:
        yield bench


def loading(bench: BenchEngine, *, num_ranks: int = 3) -> tuple[TransferLedger, LlmRequest]:
    """A ledger over `num_ranks` with one load in flight."""
    request = bench.submit(PROMPT)
    bench.kv.held[request.request_id] = [bench.kv._take(0, 5)]
    ledger = TransferLedger(
        bench.kv,
        RankOrders(bench.manager._rank, RequestErrors(), num_ranks=num_ranks),
        {request.request_id: RequestRecord(request, holds_blocks=True)},
        recording.config(),
        worker_name="Worker",
        num_ranks=num_ranks,
        tokens_per_block=T,
    )
    ledger.start_load(request.request_id, 0, 4 * T, is_async=True)
    return ledger, request


def settle(ledger: TransferLedger, *reports: Report) -> StepOutcome:
    outcome = StepOutcome()
    ledger.settle(reports, lambda *_: None, outcome, time.monotonic())
    return outcome


def failure_of(request_id: int, valid: int, *, ended: bool = True) -> TransferFailure:
    return TransferFailure(request_id, Direction.LOAD, valid, "planted", ended)


def failed(request: LlmRequest, valid: int, *, ended: bool = True) -> Report:
    return Report(1, failures=(failure_of(request.request_id, valid, ended=ended),))


def test_loaded_is_what_all_ranks_loaded(bench: BenchEngine) -> None:
    ledger, request = loading(bench)
    done, nothing = Report(1, loaded=(request.request_id,)), Report(1)
    assert settle(ledger, done, nothing, done).loaded == {}
    assert settle(ledger, nothing, done, nothing).loaded == {request.request_id: 4 * T}


@pytest.mark.parametrize("valid", [(9, 6), (6, 9)])
def test_one_rank_that_fails_fails_all_at_the_smallest_valid_position(
    bench: BenchEngine, valid: tuple[int, int]
) -> None:
    ledger, request = loading(bench)
    done = Report(1, loaded=(request.request_id,))
    outcome = settle(ledger, done, *(failed(request, one) for one in valid))
    assert outcome.failed == {request.request_id: 6}
    assert not ledger.quarantine


@pytest.mark.parametrize("ended", [True, False])
def test_nothing_is_valid_that_another_rank_may_still_write(
    bench: BenchEngine, ended: bool
) -> None:
    """It has not said how far it came: the leading blocks may be empty there."""
    ledger, request = loading(bench)
    before = list(bench.kv.blocks[request.request_id])
    done, nothing = Report(1, loaded=(request.request_id,)), Report(1)
    outcome = settle(ledger, failed(request, 9, ended=ended), done, nothing)
    assert outcome.failed == {request.request_id: 0}
    assert set(bench.kv.blocks[request.request_id]).isdisjoint(before)
    if not ended:
        settle(ledger, Report(2, loaded=(request.request_id,)), nothing, nothing)
    assert ledger.quarantine
    settle(ledger, Report(3), Report(3), Report(3, loaded=(request.request_id,)))
    assert not ledger.quarantine
    assert set(before) <= set(bench.kv.free_ids())


def test_what_every_rank_calls_valid_is_though_one_may_still_write_behind_it(
    bench: BenchEngine,
) -> None:
    ledger, request = loading(bench)
    before = list(bench.kv.blocks[request.request_id])
    done = Report(1, loaded=(request.request_id,))
    outcome = settle(ledger, failed(request, 9, ended=False), done, done)
    assert outcome.failed == {request.request_id: 8}
    assert bench.kv.blocks[request.request_id][:2] == before[:2]
    assert set(bench.kv.blocks[request.request_id][2:]).isdisjoint(before)


def late(transfers: Transfers, request: LlmRequest) -> None:
    """The deadline of its transfer has passed."""
    transfer = transfers.get(request.request_id)
    assert transfer is not None
    transfer.deadline = 0.0


def test_a_load_that_one_rank_has_not_ended_in_time_is_over_for_all(bench: BenchEngine) -> None:
    ledger, request = loading(bench)
    late(ledger.loads, request)
    done = Report(1, loaded=(request.request_id,))
    assert settle(ledger, done, done, Report(1)).failed == {request.request_id: 0}
    assert ledger.quarantine.num_blocks == 5  # all that the request held


def test_a_save_that_one_rank_does_not_end_in_time_is_over_for_all(bench: BenchEngine) -> None:
    ledger, request = loading(bench)
    ledger.start_save(request.request_id)
    late(ledger.saves, request)
    assert settle(ledger, Report(1), Report(1), Report(1)).saved == [request.request_id]
    bench.kv.free_resources(request)
    assert bench.kv.get_num_free_blocks() < len(bench.kv.pool)
    done = Report(2, saved=(request.request_id,))
    settle(ledger, done, done, Report(2))
    assert ledger.quarantine  # one rank may still read them
    settle(ledger, Report(3), Report(3), Report(3, saved=(request.request_id,)))
    assert not ledger.quarantine
    assert bench.kv.get_num_free_blocks() == len(bench.kv.pool)


@pytest.mark.parametrize(
    ("report", "problem"),
    [
        (lambda one: Report(1, saved=(one,)), "as saved, which was never passed in"),
        (lambda one: Report(1, loaded=(one, one)), "as loaded, twice"),
        (lambda one: Report(1, loaded=(one + 1,)), "as loaded, which was never passed in"),
        (lambda one: Report(1, failures=(failure_of(one, 17),)), "the load ends at 16"),
        (lambda one: Report(1, failures=(failure_of(one + 1, 0),)), "which has none"),
    ],
)
def test_an_answer_that_breaks_the_contract_is_refused_on_any_rank(
    report: Callable[[int], Report], problem: str, bench: BenchEngine
) -> None:
    ledger, request = loading(bench)
    ledger.check([Report(1)] * 3)
    for rank in range(3):
        reports = [Report(1)] * 3
        reports[rank] = report(request.request_id)
        with pytest.raises(ConnectorContractError, match=rf"Worker\..*{problem}"):
            ledger.check(reports)


def test_a_rank_may_return_a_load_once(bench: BenchEngine) -> None:
    ledger, request = loading(bench)
    done = Report(1, loaded=(request.request_id,))
    settle(ledger, done, Report(1), Report(1))
    ledger.check([Report(2), done, done])
    with pytest.raises(ConnectorContractError, match="as loaded, twice"):
        ledger.check([done, Report(2), Report(2)])


def test_the_manager_runs_alone_by_default() -> None:
    recording.fresh_script()
    manager = KvCacheConnectorManager(llm_args(recording.config()), PlainKv(), wakeup=lambda: None)
    assert manager.end_step() == StepOutcome()
    manager.shutdown()
