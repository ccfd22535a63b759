"""Ranks of one engine in threads of one process; what they exchange is pickled, as on the wire."""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Self

from bench_engine import BenchEngine, T, llm_args
from stores import DictStore

from kvconnect.errors import ConnectorContractError, RankDivergence
from kvconnect.keys import Shard, store_key
from kvconnect.request import ExternalMatch, LlmRequest

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


class Relay:
    """Hands what the leader's connector matched to the followers, as its scheduler would."""

    def __init__(
        self, bench: BenchEngine, queues: Sequence[SimpleQueue[ExternalMatch]], rank: int
    ) -> None:
        self._manager, self._queues, self._rank = bench.manager, queues, rank
        self._leads = bench.manager._scheduler is not None
        bench.kv.set_external_matcher(self)

    def match_external(self, request: LlmRequest, num_device_tokens: int) -> ExternalMatch:
        if not self._leads:
            return self._queues[self._rank].get(timeout=60)
        match = self._manager.match_external(request, num_device_tokens)
        for queue in self._queues[1:]:
            queue.put(match)
        return match

    def blocks_allocated(self, request: LlmRequest, block_ids: list[int]) -> None:
        self._manager.blocks_allocated(request, block_ids)


class Pair:
    """Ranks with a store each, mostly two. What is called here happens on all of them at once."""

    def __init__(self, stores: list[DictStore], *settings: dict[str, Any], **common: Any) -> None:
        self.stores = stores
        size = len(stores)
        self._threads = ThreadPoolExecutor(size)
        meeting, matches = Meeting(size), [SimpleQueue[ExternalMatch]() for _ in stores]
        self.benches: list[BenchEngine] = []
        common = {"lookup_timeout_ms": 60_000} | common
        for rank, own in enumerate(settings or [{}] * size):
            args = llm_args(stores[rank], shard=Shard(rank, size), **(common | own))
            bench = BenchEngine(args, communicator=Rank(meeting, rank))
            bench._ids = itertools.count()
            Relay(bench, matches, rank)
            self.benches.append(bench)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for store in self.stores:
            store.open_doors()
        self.both(lambda bench: bench.manager.end_step())  # what just ended is known to the workers
        self.both(lambda bench: bench.manager.shutdown())
        self._threads.shutdown()

    @property
    def leader(self) -> BenchEngine:
        return self.benches[0]

    def both(self, do: Callable[[BenchEngine], Any]) -> list[Any]:
        return [one.result(60) for one in [self._threads.submit(do, b) for b in self.benches]]

    def submit(self, prompt: list[int] = PROMPT, max_tokens: int = 1) -> int:
        """The id of a request that all ranks have."""
        requests = [bench.submit(prompt, max_tokens) for bench in self.benches]
        return requests[0].request_id

    def step(self, number: int = 1) -> None:
        for _ in range(number):
            self.both(BenchEngine.step)

    def preempt(self, request_id: int) -> None:
        self.both(lambda bench: bench.preempt(bench.requests[request_id]))

    def run(self) -> None:
        deadline = time.monotonic() + 60
        while any(one.queue or one.running or one.loading or one.saving for one in self.benches):
            assert time.monotonic() < deadline, "the ranks hang"
            self.step()
            time.sleep(0.001)

    def flush(self) -> None:
        """Until what is staged is written or lost."""
        assert all(self.both(lambda bench: bench.manager._worker._queue.flush(60)))

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
        requests = [bench.requests[request_id] for bench in self.benches]
        return [one.tokens.view[one.prompt_len :].tolist() for one in requests]

    def nothing_is_left(self) -> None:
        assert not self.leader.manager._scheduler._states
        for bench in self.benches:
            worker = bench.manager._worker
            assert bench.kv.get_num_free_blocks() == len(bench.kv.pool)
            assert not worker._leaving
            assert not worker._held
