"""Loads of chunks: from the store into vLLM's host memory, as the built-in pair loads blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvconnect.connector.data import TransferFailure
from kvconnect.connector.io.access import Access
from kvconnect.connector.io.load import BackgroundLoads
from kvconnect.connector.io.orders import BlockLoad, LoadBlocks
from kvconnect.integrations.vllm_tier.identity import ChunkNames

__all__ = ["Loads"]


@dataclass(slots=True, eq=False)
class _Job:
    """One of vLLM's jobs while it runs; `loaded` are its chunks that are in the host memory."""

    number: int
    loaded: list[bytes] = field(default_factory=list)
    running: int = 0


@dataclass(slots=True, eq=False)
class _Run:
    """The chunks of one KV cache group in a job: a prefix of them is of use without the rest."""

    job: _Job
    chunks: Sequence[bytes]
    cancelled: bool = False


class Loads:
    """All loads of a tier. `submit` and `cancel` may be called on any thread and do not block.

    A load ends at its deadline, or sooner if the store is left alone; then nothing is written into
    the host memory any more. The first chunk of a group that cannot be had ends its group's load.

    Args:
        access: to the store, of the host memory.
        names: of chunks in the store.
        done: called on the store's loop with a job's number and the chunks of it that are loaded.
        timeout_s: deadline of a load.
    """

    def __init__(
        self,
        access: Access,
        names: ChunkNames,
        done: Callable[[int, Sequence[bytes]], None],
        *,
        timeout_s: float,
    ) -> None:
        self._io = access.store.io
        self.names = names
        self._done = done
        self._tokens_per_block = access.store.llm_args.tokens_per_block
        self._loads = BackgroundLoads(access, self._ended, timeout_s=timeout_s)
        self._numbers = itertools.count()
        self._runs: dict[int, _Run] = {}

    def submit(self, job: int, chunks: Sequence[bytes], rows: Sequence[int]) -> None:
        """Load `chunks` into the `rows` of the host memory."""
        self._io.call_soon(lambda: self._begin(job, chunks, rows))

    def cancel(self) -> None:
        """Nothing that has been submitted is wanted any more; every job still ends."""
        self._io.call_soon(self._cancel)

    # ------------------------------------------------------------------ on the store's loop

    def _begin(self, number: int, chunks: Sequence[bytes], rows: Sequence[int]) -> None:
        groups: dict[bytes, list[tuple[bytes, int]]] = {}
        for chunk, row in zip(chunks, rows, strict=True):
            groups.setdefault(chunk[-4:], []).append((chunk, row))
        job = _Job(number, running=len(groups))
        if not groups:
            self._done(number, ())
        for pairs in groups.values():
            run = next(self._numbers)
            self._runs[run] = _Run(job, [chunk for chunk, _ in pairs])
            blocks = tuple(BlockLoad(self.names.block_key(chunk), row) for chunk, row in pairs)
            end = len(blocks) * self._tokens_per_block
            self._loads.start(LoadBlocks(run, start=0, end=end, blocks=blocks))

    def _cancel(self) -> None:
        for number, run in self._runs.items():
            run.cancelled = True  # which ends without a failure, and is none of a success
            self._loads.cancel(number)

    def _ended(self, number: int, failure: TransferFailure | None) -> None:
        run = self._runs.pop(number)
        valid = len(run.chunks)
        if run.cancelled:
            valid = 0
        elif failure is not None:
            valid = failure.num_valid_tokens // self._tokens_per_block
        job = run.job
        job.loaded += run.chunks[:valid]
        job.running -= 1
        if not job.running:
            self._done(job.number, job.loaded)
