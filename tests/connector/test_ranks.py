"""Several ranks: success is what all agree on, failure what one says, and nobody waits alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import pytest
import recording
from bench_engine import BenchEngine, PlainKv, T, llm_args
from ranks import PROMPT, Meeting, Rank
from recording import Recorder, RecordingWorker, Script

from kvconnect.connector.communicator import LoadOrder, Report, SingleProcess, agreed
from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.connector.runtime.ledger import StepOutcome, TransferLedger
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.connector.runtime.reporting import RequestRecord
from kvconnect.connector.runtime.request_errors import RequestErrors
from kvconnect.errors import ConnectorContractError, RankDivergence, UsageError
from kvconnect.request import LlmRequest


class Ranks:
    """Two managers in two threads, each with its own cache and worker."""

    def __init__(self, **settings: object) -> None:
        self.meeting = Meeting(2)
        self.scripts = [recording.fresh_script() for _ in range(2)]
        self.threads = ThreadPoolExecutor(2)
        self.benches: list[BenchEngine] = []
        for rank in range(2):
            recording.script = self.scripts[rank]
            args = llm_args(recording.config(**settings))
            self.benches.append(BenchEngine(args, communicator=Rank(self.meeting, rank)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for bench in self.benches:
            bench.manager.shutdown()
        self.threads.shutdown()

    def both(self, do: Callable[[BenchEngine], Any]) -> list[Any]:
        """`do` on both ranks at once."""
        return [one.result(60) for one in [self.threads.submit(do, b) for b in self.benches]]

    def submit(self) -> list[LlmRequest]:
        """The same request, under the same id, on both."""
        first = self.benches[0].submit(PROMPT)
        BenchEngine._ids = iter([first.request_id, *range(first.request_id + 1, 10**6)])
        return [first, self.benches[1].submit(PROMPT)]

    def idle_step(self) -> list[StepOutcome]:
        return self.both(lambda bench: bench.manager.end_step())


def compute(bench: BenchEngine) -> None:
    """One step in which the only request is computed to its end."""
    bench.kv.set_external_matcher(None)  # followers do not ask
    [request] = bench.queue
    bench.manager.blocks_allocated(request, [])
    bench.step()


def never(*_: object) -> tuple[list[int], list[int]]:
    return [], []


def test_blocks_stay_until_the_last_rank_has_saved_them() -> None:
    with Ranks() as ranks:
        requests = ranks.submit()
        request_id = requests[0].request_id
        for script in ranks.scripts:
            script.keep = lambda _: True
            script.finished = never
        ranks.both(compute)
        assert all(bench.kv.blocks for bench in ranks.benches)
        ranks.idle_step()
        ranks.scripts[0].finished = lambda *_: ([request_id], [])
        assert [one.saved for one in ranks.idle_step()] == [[], []]
        ranks.scripts[0].finished = never
        assert [one.saved for one in ranks.idle_step()] == [[], []]
        ranks.scripts[1].finished = lambda *_: ([request_id], [])
        assert [one.saved for one in ranks.idle_step()] == [[request_id], [request_id]]


def test_a_step_has_two_exchanges_with_or_without_a_batch() -> None:
    with Ranks() as ranks:
        ranks.submit()
        for script in ranks.scripts:
            script.keep = lambda _: True
        barriers_per_exchange = 2
        ranks.both(compute)
        assert ranks.meeting.exchanges == 2 * barriers_per_exchange
        ranks.idle_step()
        assert ranks.meeting.exchanges == 4 * barriers_per_exchange


def test_what_the_leader_does_not_keep_all_ranks_free_a_step_later() -> None:
    with Ranks() as ranks:
        request_id = ranks.submit()[0].request_id
        ranks.both(compute)
        assert all(bench.kv.blocks for bench in ranks.benches)
        assert [bench.manager.wait_seconds() for bench in ranks.benches] == [0.0, 0.0]
        assert [one.saved for one in ranks.idle_step()] == [[request_id], [request_id]]
        assert [script.named("get_finished")[-1] for script in ranks.scripts] == [([], [])] * 2


def test_only_the_leader_has_a_scheduler() -> None:
    with Ranks() as ranks:
        assert isinstance(ranks.scripts[0].scheduler, Recorder)
        assert ranks.scripts[1].scheduler is None
        assert isinstance(ranks.scripts[1].worker, RecordingWorker)
        request = ranks.submit()[1]
        with pytest.raises(UsageError, match="rank 1 is not the leader"):
            ranks.benches[1].manager.match_external(request, 0)


def test_a_broken_contract_on_one_rank_is_raised_on_all() -> None:
    with Ranks() as ranks:
        ranks.scripts[1].finished = lambda *_: ([], [4711])

        def raises(bench: BenchEngine) -> str:
            with pytest.raises(ConnectorContractError) as caught:
                bench.manager.end_step()
            return str(caught.value)

        assert len(set(ranks.both(raises))) == 1


def raised_by(run: Callable[[], object]) -> Exception | None:
    try:
        run()
    except Exception as error:  # noqa: BLE001 (whatever it is)
        return error
    return None


@pytest.mark.parametrize("ahead", [0, 1])
def test_ranks_in_different_steps_all_raise_at_once(ahead: int) -> None:
    with Ranks() as ranks:
        ranks.benches[ahead].manager._steps.number += 1
        errors = ranks.both(lambda bench: raised_by(bench.manager.end_step))
        assert [type(one) for one in errors] == [RankDivergence, RankDivergence]


STEP_METHODS = ["bind_connector_meta", "start_load_kv", "wait_for_layer_load", "save_kv_layer"]
STEP_METHODS += ["wait_for_save", "get_finished", "get_failed", "build_worker_meta"]


def planted(*_: object) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", STEP_METHODS)
def test_what_a_worker_raises_ends_the_step_on_all_ranks(method: str, rank: int) -> None:
    with Ranks() as ranks:
        ranks.submit()
        setattr(ranks.scripts[rank].worker, method, planted)
        errors = ranks.both(lambda bench: raised_by(lambda: compute(bench)))
        assert str(errors[rank]) == "planted"
        other = errors[1 - rank]
        assert isinstance(other, ConnectorContractError)
        assert str(other) == f"rank {rank}: RuntimeError: planted"


@pytest.mark.parametrize("idle", [False, True])
def test_what_the_leaders_scheduler_raises_ends_the_step_on_all_ranks(idle: bool) -> None:
    with Ranks() as ranks:
        ranks.submit()
        ranks.scripts[0].meta = planted
        ranks.scripts[0].scheduler.build_idle_meta = planted  # type: ignore[union-attr]
        step = (lambda bench: bench.manager.end_step()) if idle else compute
        errors = ranks.both(lambda bench: raised_by(lambda: step(bench)))
        assert str(errors[0]) == "planted"
        assert isinstance(errors[1], ConnectorContractError)
        assert str(errors[1]) == "rank 0: RuntimeError: planted"


def after_a_failed_load(ranks: Ranks, rank: int, method: str) -> list[Exception | None]:
    """Two steps, in the first of which `method` of `rank` raises; what each rank raises."""
    requests = ranks.submit()
    broken = ranks.scripts[rank]
    setattr(broken.worker if method == "cancel" else broken.scheduler, method, planted)
    ranks.scripts[0].match = lambda *_: (2 * T, False)
    for script in ranks.scripts:
        failure = TransferFailure(requests[0].request_id, Direction.LOAD, writes_ended=False)
        script.failures = [failure]

    def two_steps(bench: BenchEngine) -> None:
        [request] = bench.queue
        if bench is ranks.benches[1]:
            compute(bench)
        else:
            bench._raise_first = lambda: None  # type: ignore[method-assign]
            bench.step()
        assert request.num_tokens == len(PROMPT)
        bench.manager.end_step()

    return ranks.both(lambda bench: raised_by(lambda: two_steps(bench)))


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
        errors, none = ranks.both(lambda bench: bench.manager.take_errors())
        assert none == {}
        [error] = errors.values()
        if rank == 0:
            assert str(error) == "planted"
        else:
            assert isinstance(error, ConnectorContractError)
            assert str(error) == "rank 1: RuntimeError: planted"
        ranks.idle_step()  # each is told once
        assert ranks.both(lambda bench: bench.manager.take_errors()) == [{}, {}]


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
    """A ledger over `num_ranks` with one load in flight, as rank 0 sees it."""
    request = bench.submit(PROMPT)
    bench.kv.blocks[request.request_id] = bench.kv._take(5)
    script = Script()
    ledger = TransferLedger(
        bench.kv,
        bench.manager._worker,
        {request.request_id: RequestRecord(request, holds_blocks=True)},
        RequestErrors(rank=0),
        recording.config(),
        rank=0,
        num_ranks=num_ranks,
        tokens_per_block=T,
    )
    ledger.start_load(LoadOrder(request.request_id, 0, 4 * T, is_async=True))
    assert script.calls == []
    return ledger, request


def settle(ledger: TransferLedger, *reports: Report) -> StepOutcome:
    outcome = StepOutcome()
    ledger.settle(list(reports), lambda *_: None, outcome)
    return outcome


def failed(request: LlmRequest, valid: int, *, ended: bool = True) -> Report:
    failure = TransferFailure(request.request_id, Direction.LOAD, valid, "planted", ended)
    return Report(1, failures=(failure,))


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


def test_a_rank_past_its_deadline_times_out_for_all(bench: BenchEngine) -> None:
    ledger, request = loading(bench)
    done = Report(1, loaded=(request.request_id,))
    late = Report(1, expired_loads=(request.request_id,))
    assert settle(ledger, done, done, late).failed == {request.request_id: 0}
    assert ledger.quarantine.num_blocks == 5  # all that the request held


def test_a_save_that_one_rank_gives_up_waiting_for_is_over_on_all(bench: BenchEngine) -> None:
    ledger, request = loading(bench)
    ledger.start_save(request.request_id)
    settle(ledger, Report(1, expired_saves=(request.request_id,)), Report(1), Report(1))
    bench.kv.free_resources(request)
    assert bench.kv.get_num_free_blocks() < len(bench.kv.pool)
    done = Report(2, saved=(request.request_id,))
    settle(ledger, done, done, Report(2))
    assert ledger.quarantine  # one rank may still read them
    settle(ledger, Report(3), Report(3), Report(3, saved=(request.request_id,)))
    assert not ledger.quarantine
    assert bench.kv.get_num_free_blocks() == len(bench.kv.pool)


def test_the_manager_runs_alone_by_default() -> None:
    recording.fresh_script()
    manager = KvCacheConnectorManager(llm_args(recording.config()), PlainKv(), wakeup=lambda: None)
    assert manager.end_step() == StepOutcome()
    manager.shutdown()
