"""Several ranks: success is what all agree on, failure what one says, and nobody waits alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import pytest
import recording
from bench_engine import BenchEngine, PlainKv, T, llm_args
from ranks import Meeting, Rank
from recording import Recorder, RecordingWorker, Script

from kvconnect.connector.communicator import LoadOrder, Report, SingleProcess, agreed
from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.connector.runtime.ledger import StepOutcome, TransferLedger
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.connector.runtime.reporting import RequestRecord
from kvconnect.errors import ConnectorContractError, RankDivergence, UsageError
from kvconnect.request import LlmRequest

PROMPT = list(range(1, 4 * T + 2))


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
        return [one.result(20) for one in [self.threads.submit(do, b) for b in self.benches]]

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


def test_what_the_leader_does_not_keep_followers_free_a_step_later() -> None:
    with Ranks() as ranks:
        request = ranks.submit()[0]
        ranks.both(compute)
        assert not ranks.benches[0].kv.blocks
        assert ranks.benches[1].kv.blocks
        assert [one.saved for one in ranks.idle_step()] == [[], [request.request_id]]


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


def test_ranks_in_different_steps_do_not_hang() -> None:
    with Ranks() as ranks:
        ranks.benches[1].manager._step += 1

        def diverges(bench: BenchEngine) -> bool:
            try:
                bench.manager.end_step()
            except (RankDivergence, threading.BrokenBarrierError):
                ranks.meeting._barrier.abort()
                return True
            return False

        assert ranks.both(diverges) == [True, True]


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
        recording.config(),
        rank=0,
        num_ranks=num_ranks,
        tokens_per_block=T,
    )
    ledger.start_load(LoadOrder(request.request_id, 0, 4 * T, is_async=True))
    assert script.calls == []
    return ledger, request


def settle(ledger: TransferLedger, *reports: Report) -> StepOutcome:
    return ledger.settle(list(reports), lambda *_: None)


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


def test_blocks_that_another_rank_may_still_write_are_held(bench: BenchEngine) -> None:
    ledger, request = loading(bench)
    before = list(bench.kv.blocks[request.request_id])
    outcome = settle(ledger, failed(request, 9), Report(1), Report(1))
    assert outcome.failed == {request.request_id: 8}
    assert bench.kv.blocks[request.request_id][:2] == before[:2]
    assert set(bench.kv.blocks[request.request_id][2:]).isdisjoint(before)
    late = Report(2, loaded=(request.request_id,))
    settle(ledger, Report(2), late, Report(2))
    assert ledger.quarantine
    settle(ledger, Report(3), Report(3), late)
    assert not ledger.quarantine
    assert set(before[2:]) <= set(bench.kv.free_ids())


def test_a_rank_past_its_deadline_times_out_for_all(bench: BenchEngine) -> None:
    ledger, request = loading(bench)
    done = Report(1, loaded=(request.request_id,))
    late = Report(1, expired_loads=(request.request_id,))
    assert settle(ledger, done, done, late).failed == {request.request_id: 0}
    assert ledger.quarantine.num_blocks == 4


def test_the_manager_runs_alone_by_default() -> None:
    recording.fresh_script()
    manager = KvCacheConnectorManager(llm_args(recording.config()), PlainKv(), wakeup=lambda: None)
    assert manager.end_step() == StepOutcome()
    manager.shutdown()
