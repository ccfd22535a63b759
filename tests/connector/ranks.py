"""Ranks of one engine in threads of one process; what they exchange is pickled, as on the wire."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from bench_engine import BenchEngine, T, llm_args
from bench_rank import BenchRank
from stores import DictStore
from torch import Tensor
from waiting import until

from kvconnect.connector.runtime.transfers import StepOutcome
from kvconnect.errors import ConnectorContractError, RankDivergence
from kvconnect.keys import Shard, store_key

PROMPT = list(range(1, 4 * T + 2))  # four blocks and a token


class Meeting:
    """Where the ranks of one process exchange values, in turn."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.exchanges = 0
        self._barrier = threading.Barrier(size, action=self._count, timeout=60)
        self._failure: Exception | None = None

    def _count(self) -> None:
        self.exchanges += 1

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = pickle.dumps(value)
        self._meet()
        values = [pickle.loads(one) for one in self.values]
        self._meet()
        return values

    def fail(self, rank: int, error: Exception) -> None:
        if self._failure is None:
            text = f"rank {rank}: {type(error).__name__}: {error}"
            diverged = isinstance(error, RankDivergence)
            self._failure = RankDivergence(str(error)) if diverged else ConnectorContractError(text)
            self._barrier.abort()

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise self._failure or TimeoutError("a rank did not come") from None


class Rank:
    """One rank's end of a meeting."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    def broadcast(self, value: Any) -> Any:
        return self._meeting.exchange(self.rank, value)[0]

    def allgather(self, value: Any) -> list[Any]:
        return self._meeting.exchange(self.rank, value)

    def fail(self, error: Exception) -> None:
        self._meeting.fail(self.rank, error)


class Pair:
    """Ranks with a store each, mostly two: an engine on the first, which the others follow."""

    engine = BenchEngine

    def __init__(self, stores: list[DictStore], *settings: dict[str, Any], **common: Any) -> None:
        self.stores = stores
        size = len(stores)
        self._threads = ThreadPoolExecutor(size)
        meeting = Meeting(size)
        common = {"lookup_timeout_ms": 60_000} | common
        args = [
            llm_args(stores[rank], shard=Shard(rank, size), **(common | own))
            for rank, own in enumerate(settings or [{}] * size)
        ]
        self.leader = self.engine(args[0], communicator=Rank(meeting, 0))
        self.leader._ids = itertools.count()
        self.others = [BenchRank(args[rank], Rank(meeting, rank)) for rank in range(1, size)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for store in self.stores:
            store.open_doors()
        self.idle_step()  # what just ended is known to the workers
        for worker in self.workers:
            self._threads.submit(worker.shutdown)
        self._threads.shutdown()
        self.leader.manager.shutdown()

    @property
    def workers(self) -> list[Any]:
        return [self.leader.manager._worker, *(one.worker for one in self.others)]

    @property
    def pools(self) -> list[Tensor]:
        return [self.leader.kv.pool, *(one.pool for one in self.others)]

    def _together(self, lead: Callable[[], Any]) -> Any:
        others = [self._threads.submit(one.step) for one in self.others]
        outcome = self._threads.submit(lead).result(60)
        for one in others:
            one.result(60)
        return outcome

    def submit(self, prompt: list[int] = PROMPT, max_tokens: int = 1) -> int:
        return self.leader.submit(prompt, max_tokens).request_id

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self._together(self.leader.step)

    def idle_step(self) -> StepOutcome:
        outcome: StepOutcome = self._together(self.leader.idle_step)
        return outcome

    def abort(self, request_id: int) -> None:
        self.leader.abort(self.leader.requests[request_id])

    def preempt(self, request_id: int) -> None:
        """The blocks of the request, and all that are free, get other content at once."""
        leader = self.leader
        leader.preempt(leader.requests[request_id])
        leader.overwritten = leader.kv.free_ids()
        leader.kv.pool[leader.overwritten] = 9.0

    def run(self) -> None:
        deadline, leader = time.monotonic() + 60, self.leader
        while leader.queue or leader.running or leader.loading or leader.saving:
            assert time.monotonic() < deadline, "the ranks hang"
            self.step()
            time.sleep(0.001)

    def flush(self) -> None:
        """Until what is staged is written or lost."""
        assert all(worker._queue.flush(60) for worker in self.workers)

    def store_keys(self, rank: int) -> list[bytes]:
        """What the store of `rank` knows the blocks of the first request by."""
        return [
            store_key(key, 0, Shard(rank, len(self.stores)))
            for key in self.leader.requests[0].block_keys()
        ]

    def saved(self, request_id: int, *, tail: bool = False) -> list[int]:
        """How many leading blocks of the request the store of each rank has."""
        request = self.leader.requests[request_id]
        keys = request.block_keys()
        if tail:
            keys = [*keys, request.key_chain.tail(request.num_computed_tokens)]
        counts = []
        for rank, store in enumerate(self.stores):
            known = [
                store_key(key, 0, Shard(rank, len(self.stores))) in store.frames for key in keys
            ]
            counts.append([*known, False].index(False))
        return counts

    def answer(self, request_id: int) -> list[list[int]]:
        """What was generated, and what the KV of each other rank says that it should have been."""
        request = self.leader.requests[request_id]
        positions = range(request.prompt_len, request.num_tokens)
        others = [[one.sampled[request_id][at] for at in positions] for one in self.others]
        return [request.tokens.view[request.prompt_len :].tolist(), *others]

    def nothing_is_left(self) -> None:
        scheduler = self.leader.manager._scheduler
        assert not scheduler._plans
        assert not scheduler._finding._prompts
        assert self.leader.kv.get_num_free_blocks() == len(self.leader.kv.pool)
        for worker in self.workers:
            assert not worker._leaving
            assert not worker._held
            assert not worker._missing
            staging = worker._access.staging
            until(lambda one=worker: not one._loads._running)
            until(lambda one=staging: one.num_free == one.num_slots)
