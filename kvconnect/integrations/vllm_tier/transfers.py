"""The loads and saves of chunks between vLLM's host memory and the store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvconnect.backend import StoredBlock
from kvconnect.connector.data import Direction
from kvconnect.connector.io.access import SAVES_IN_FLIGHT, Access
from kvconnect.connector.io.load import Loads
from kvconnect.connector.io.orders import BlockLoad
from kvconnect.connector.io.runs import RunLoads
from kvconnect.errors import BackendTimeout, KvConnectError
from kvconnect.integrations.vllm_tier.identity import ChunkNames
from kvconnect.trace import count, warn_once


@dataclass(frozen=True, slots=True)
class ChunkSave:
    """A chunk to store: its row in the host memory, and the chunk before it.

    `parent` is ``b""`` for the first chunk of a prompt, and ``None`` if it is not known.
    """

    chunk: bytes
    row: int
    parent: bytes | None


@dataclass(slots=True, eq=False)
class _Job:
    number: int
    left: int
    stored: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """The chunks of one job that go to the store in one call, not later than `until`."""

    job: _Job
    saves: Sequence[ChunkSave]
    until: float


class Saves:
    """The saves of a tier. `submit` may be called on any thread and does not block.

    vLLM keeps the rows of a job unchanged until the job ends, so waiting chunks occupy its host
    memory. At most `most_waiting` chunks wait, each for at most `timeout_s`. A job of any size may
    wait if the store is idle. Chunks beyond that are lost, which is counted
    (``connector.save.lost``); a later request computes them.

    Args:
        access: to the store, of the host memory.
        names: returns the present names of chunks in the store.
        done: called on the store's loop with a job's number and how many chunks of it are stored.
        timeout_s: for how long a chunk may wait for its turn.
        most_waiting: the number of chunks that may wait.
    """

    def __init__(
        self,
        access: Access,
        names: Callable[[], ChunkNames],
        done: Callable[[int, int], None],
        *,
        timeout_s: float,
        most_waiting: int,
    ) -> None:
        self._access = access
        self._names = names
        self._done = done
        self._timeout_s = timeout_s
        self._most_waiting = most_waiting
        self._size = access.call_blocks
        self._pieces: deque[_Piece] = deque()
        self._waiting = 0
        self._writes: set[asyncio.Task[None]] = set()
        self._closed = False
        access.staging.on_free(self._freed)

    def submit(self, job: int, saves: Sequence[ChunkSave]) -> None:
        """Queues `saves`, parents before children, for the store; does not block.

        `done` is called with the job's number once every chunk is stored or lost. The rows must
        stay unchanged until then.
        """
        self._access.store.io.call_soon(lambda: self._begin(job, saves))

    def close(self) -> None:
        """Drops waiting chunks, now and from now on. Every job still ends."""
        self._access.store.io.call_soon(self._close)

    # ------------------------------------------------------------------ on the store's loop

    def _begin(self, number: int, saves: Sequence[ChunkSave]) -> None:
        job = _Job(number, len(saves))
        room = max(0, self._most_waiting - self._waiting)
        if self._closed:
            room = 0
        elif not self._waiting and not self._writes:  # a job of any size: its rows are kept anyway
            room = len(saves)
        until = self._now() + self._timeout_s
        for start in range(0, min(room, len(saves)), self._size):
            part = saves[start : min(start + self._size, room)]
            self._pieces.append(_Piece(job, part, until))
            self._waiting += len(part)
        self._end(job, max(0, len(saves) - room), 0, "too many chunks wait for the store")
        self._pump()

    def _close(self) -> None:
        self._closed = True
        while self._pieces:
            self._drop("the tier was closed")

    def _freed(self) -> None:
        if self._pieces:
            self._access.store.io.call_soon(self._pump)

    def _pump(self) -> None:
        while self._pieces and len(self._writes) < SAVES_IN_FLIGHT:
            piece = self._pieces[0]
            if piece.until < self._now():
                self._drop(f"they waited longer than {self._timeout_s:g} s")
                continue
            slots = self._access.staging.take(Direction.SAVE, len(piece.saves))
            if not slots:
                return
            now, later = piece.saves[: len(slots)], piece.saves[len(slots) :]
            self._pieces.popleft()
            self._waiting -= len(now)
            if later:
                self._pieces.appendleft(_Piece(piece.job, later, piece.until))
            write = asyncio.get_running_loop().create_task(self._write(piece.job, now, slots))
            self._writes.add(write)
            write.add_done_callback(self._written)

    def _written(self, write: asyncio.Task[None]) -> None:
        self._writes.discard(write)
        self._pump()

    async def _write(self, job: _Job, saves: Sequence[ChunkSave], slots: Sequence[int]) -> None:
        stored, reason = 0, "the store has no room"
        pending: Future[None] | None = None
        try:
            rows = [save.row for save in saves]
            copier = self._access.copiers[0]
            await self._access.store.copying.run(lambda: copier.copy_out(rows, slots, None))
            blocks = [self._block(save, slot) for save, slot in zip(saves, slots, strict=True)]
            stored = await self._access.store.backend.save(blocks)
        except BackendTimeout as error:
            pending, reason = error.pending, str(error)
        except KvConnectError as error:
            reason = str(error)
        finally:
            self._access.staging.give_back(Direction.SAVE, slots, pending)
            self._end(job, len(saves), stored, reason)

    def _block(self, save: ChunkSave, slot: int) -> StoredBlock:
        names = self._names()
        return StoredBlock(
            key=self._access.store_key(names.block_key(save.chunk), 0),
            data=self._access.frame(slot, 0),
            parent=None
            if save.parent is None
            else self._access.store_key(names.block_key(save.parent), 0),
            namespace=names.namespace,
            model=names.model,
        )

    def _drop(self, reason: str) -> None:
        piece = self._pieces.popleft()
        self._waiting -= len(piece.saves)
        self._end(piece.job, len(piece.saves), 0, reason)

    def _end(self, job: _Job, ended: int, stored: int, reason: str) -> None:
        """Records that `ended` chunks of `job` are done, of which `stored` are in the store."""
        if lost := ended - stored:
            count("connector.save.lost", blocks=lost)
            warn_once("vllm_tier.save.lost", f"{lost} chunks were not stored: {reason}")
        job.stored += stored
        job.left -= ended
        if not job.left:
            job.left = -1
            self._done(job.number, job.stored)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class ChunkLoads:
    """The loads of a tier. `submit` and `cancel` may be called on any thread and do not block.

    A load ends at its deadline, or sooner if the store is not used any more. After its end, the
    host memory is not written any more. The first chunk of a group that cannot be loaded ends its
    group's load.

    Args:
        access: to the store, of the host memory.
        names: returns the present names of chunks in the store.
        done: called on a thread of the store with a job's number and its chunks that are loaded.
        timeout_s: deadline of a load.
    """

    def __init__(
        self,
        access: Access,
        names: Callable[[], ChunkNames],
        done: Callable[[int, Sequence[bytes]], None],
        *,
        timeout_s: float,
    ) -> None:
        self._io = access.store.io
        self._names = names
        self._done = done
        self._loads = Loads(access, timeout_s=timeout_s)

    def submit(self, job: int, chunks: Sequence[bytes], rows: Sequence[int]) -> None:
        """Loads `chunks` into the `rows` of the host memory."""
        self._io.call_soon(lambda: self._begin(job, chunks, rows))

    def cancel(self) -> None:
        """Cancels all submitted loads. Every job still ends."""
        self._loads.cancel()
        self._io.call_soon(self._loads.cancel)  # for those that the loop has not begun

    def _begin(self, number: int, chunks: Sequence[bytes], rows: Sequence[int]) -> None:
        groups: dict[bytes, list[tuple[bytes, int]]] = {}
        for chunk, row in zip(chunks, rows, strict=True):
            groups.setdefault(chunk[-4:], []).append((chunk, row))
        names = self._names()
        runs = [
            [BlockLoad(names.block_key(chunk), row) for chunk, row in pairs]
            for pairs in groups.values()
        ]

        def ended(valid: Sequence[int]) -> None:
            loaded = zip(groups.values(), valid, strict=True)
            self._done(number, [chunk for pairs, count in loaded for chunk, _ in pairs[:count]])

        RunLoads(self._loads, runs, ended)
