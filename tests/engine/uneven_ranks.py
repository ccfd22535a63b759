"""The built-in pair with a second rank that loads in its own time; it imports this by name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvconnect.connector.data import LlmArgs
from kvconnect.connector.offload import OffloadScheduler, OffloadWorker
from kvconnect.errors import BackendUnavailable

_args: dict[int, LlmArgs] = {}


def with_store(llm_args: LlmArgs) -> LlmArgs:
    """With the store of the environment: a configuration names a store or a module, not both."""
    return _args.setdefault(id(llm_args), replace(llm_args, backend=os.environ["UNEVEN_STORE"]))


class Scheduler(OffloadScheduler):
    """The built-in one."""

    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(with_store(llm_args))


class Worker(OffloadWorker):
    """Reads block by block.

    On the second rank, of the first load a block comes with each step that computes beside it; of
    the second load all come but the fourth from the end.
    """

    num_loads = 0

    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(with_store(llm_args))

    def register_planes(self, pools: Sequence[Any]) -> None:
        super().register_planes(pools)
        self._access.call_blocks = 1
        if self._llm_args.rank == 1:
            self._fetch, self._access.fetch = self._access.fetch, self._in_its_time
            self._turns = asyncio.Semaphore(0)
            self._num_reads = 0

    def start_load_kv(self, stream: Any) -> None:
        super().start_load_kv(stream)
        if self._llm_args.rank != 1 or self._metadata is None:
            return
        if self._metadata.loads:
            self.num_loads += 1
            self._num_reads = 0
        if self._metadata.floors:
            self._store.io.call_soon(self._turns.release)

    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]):
        saved, loaded = super().get_finished(finished_gen_req_ids, started_loading_req_ids)
        if loaded and self._llm_args.rank == 1:  # no read is left behind
            self._store.io.call_soon(lambda: [self._turns.release() for _ in range(20)])
        return saved, loaded

    async def _in_its_time(self, blocks: Sequence[Any], slots: Sequence[Any]) -> int:
        if self.num_loads == 1:
            await self._turns.acquire()
        self._num_reads += 1
        if self.num_loads == 2 and self._num_reads == 4:
            raise BackendUnavailable("planted")
        return await self._fetch(blocks, slots)


STOPS = [(1, 5), (1, 0), (0, 0)]
"""Of each load: the rank on which it stops, after how many blocks."""


class StoppingWorker(OffloadWorker):
    """Reads block by block. A load stops on one rank, see `STOPS`; on the other it is quick."""

    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(with_store(llm_args))
        self._num_loads = 0

    def register_planes(self, pools: Sequence[Any]) -> None:
        super().register_planes(pools)
        self._access.call_blocks = 1
        self._fetch, self._access.fetch = self._access.fetch, self._until_it_stops

    def start_load_kv(self, stream: Any) -> None:
        if self._metadata is not None and self._metadata.loads:
            self._rank, self._left = STOPS[self._num_loads]
            self._num_loads += 1
            self._over = asyncio.Event()
        super().start_load_kv(stream)

    def get_finished(self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]):
        saved, loaded = super().get_finished(finished_gen_req_ids, started_loading_req_ids)
        if loaded:
            self._store.io.call_soon(self._over.set)  # no read is left behind
        return saved, loaded

    async def _until_it_stops(self, blocks: Sequence[Any], slots: Sequence[Any]) -> int:
        self._left -= 1
        if self._llm_args.rank == self._rank and self._left < 0:
            await self._over.wait()
        return await self._fetch(blocks, slots)
