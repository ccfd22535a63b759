"""The loads: store to staging to pool, several pieces at a time, in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.connector.io.access import LOADS_IN_FLIGHT, Access, CallTimes
from kvconnect.connector.io.copiers import copy_batches
from kvconnect.connector.io.orders import LoadBlocks
from kvconnect.errors import BackendTimeout, KvConnectError, RetryLater
from kvconnect.explain.outcome import Outcome
from kvconnect.trace import count

# A load of few full calls is split into calls of this share of a full one, so many at a time: the
# copies after the last call overlap with no read.
_SHORT_SHARE = 4
_SHORT_IN_FLIGHT = 4
# A load that overlaps with computing is split into so many pieces, if calls that small still hide
# the time that an answer takes.
_FINE_PIECES = 16
# Between two checks whether the store is still available.
_LOOK_S = 0.25
# A load that gets no block for this long starts probes of the store, each this long after the last
# answer; and the timeout of a probe.
_STALL_S = 1.0
_PROBE_S = 2.0


class Load:
    """A running load. Belongs to the store's loop, except for what `placing` guards.

    Args:
        order: the order of the load.
        done: called once, when the load has ended: on a copy thread if every block is in the pool,
            else on the loop.
        arrived: called on a copy thread when blocks have been copied into the pool, and the load
            has not ended.

    Attributes:
        copied: a flag for each block: true if it is in the pool.
        closed: true if no more copies into the pool start, because the load was cancelled, failed
            or ran out of time. Any thread may set it, even while the loop is stuck. A running copy,
            of 64 blocks at most, continues to its end.
        ended: true from before the call of `done`; guarded.
        failure: set once the load has ended; ``None``: every block is in the pool, or the load was
            cancelled.
        placing: held while blocks are copied into the pool, and while their flags are set.
    """

    def __init__(
        self,
        order: LoadBlocks,
        done: Callable[[Load], None],
        arrived: Callable[[], None] | None = None,
    ) -> None:
        self.order = order
        self.done = done
        self.arrived = arrived
        self.copied = bytearray(len(order.blocks))
        self.closed = False
        self.cancelled = False
        self.ended = False
        self._times: list[tuple[int, float]] = []
        self._noted = 0
        self._started = time.monotonic()
        self.reason = ""
        self.loss = Outcome.FAILED
        self.failure: TransferFailure | None = None
        self.wanted = len(order.blocks)  # leading blocks to load: the later ones are computed
        self.stop = len(order.blocks)  # blocks from here on are not read
        self.placing = threading.Lock()
        self.next = 0
        self.reading = 0  # calls to the store under way
        self.copying = 0  # pieces that have arrived and are not in the pool yet
        self.news = asyncio.Event()

    def fail(self, block: int, reason: str, loss: Outcome = Outcome.FAILED) -> None:
        """Records that block number `block` cannot be loaded."""
        self.stop = min(self.stop, block)
        if not self.reason:
            self.reason, self.loss = reason, loss
        self.news.set()

    def close(self, reason: str, loss: Outcome = Outcome.FAILED) -> None:
        """Stops the load."""
        self.closed = True
        self.fail(len(self.order.blocks), reason, loss)

    def raise_floor(self, num_tokens: int, tokens_per_block: int) -> None:
        """Stops the load from writing to blocks with tokens before `num_tokens`.

        Blocks until a running copy, of 64 blocks at most, has ended. Called on the engine's thread.
        """
        wanted = self.order.num_from(-(-num_tokens // tokens_per_block))
        if wanted < self.wanted:
            with self.placing:
                self.wanted = wanted

    @property
    def complete(self) -> bool:
        """Returns whether every block to load is in the pool."""
        return self.num_valid_blocks() >= self.wanted

    def note_copied(self, first: int, num_blocks: int) -> bool:
        """Records that `num_blocks` from `first` on are in the pool; on a copy thread.

        Returns true if the load ends with them: the caller calls `done`.
        """
        with self.placing:
            self.copied[first : first + num_blocks] = b"\1" * num_blocks
            valid = self.num_valid_blocks()
            if self.order.overlaps and valid > self._noted:
                self._noted = valid
                self._times.append((valid, time.monotonic() - self._started))
            missing = valid < self.wanted or self.stop < len(self.order.blocks)
            if missing or self.closed or self.ended:
                return False
            self.ended = True
            return True

    def take_times(self) -> list[tuple[int, float]]:
        """Returns the numbers of blocks, with seconds, recorded since the last call."""
        with self.placing:
            taken, self._times = self._times, []
        return taken

    def num_valid_blocks(self) -> int:
        """Returns the number of leading blocks that are in the pool."""
        missing = self.copied.find(0)
        return len(self.copied) if missing < 0 else missing


class Loads:
    """The loads of one access.

    A load fails at its deadline, or as soon as the store's breaker opens, as its other pieces would
    be refused. While no block arrives, the store is probed for a key that is in no store. A frozen
    store fails five probes, which open the breaker, whether or not it has other calls. A store that
    is only slow answers the probes.

    A failed or cancelled load reports its end only when no more of its blocks will be copied into
    the pool. A store that answers after its deadline writes into staging slots, which stay reserved
    until then, and never into the pool. So every failure here has `writes_ended`.

    A load that overlaps with computing fills its blocks from the last to the first, piece by piece,
    and ends when the computed tokens reach them. A piece that lacks a block is discarded.

    Args:
        access: the access that the loads use.
        timeout_s: seconds that a load may take.

    Attributes:
        tokens_per_block: the tokens per block of every pool.
    """

    def __init__(self, access: Access, *, timeout_s: float) -> None:
        self._access = access
        self._timeout_s = timeout_s
        self.tokens_per_block = access.store.llm_args.tokens_per_block
        self._running: set[Load] = set()
        self._overlapping: dict[int, Load] = {}  # beside computing, until reported
        self._calls = CallTimes()
        self._reads: set[asyncio.Task[None]] = set()
        self._probing: asyncio.Task[None] | None = None
        access.staging.on_free(self._slots_freed)

    def start(
        self,
        order: LoadBlocks,
        done: Callable[[Load], None],
        arrived: Callable[[], None] | None = None,
    ) -> Load:
        """Starts a load, on any thread; the callbacks are those of `Load`, and may not block.

        `arrived` is called only if the load overlaps with computing.
        """
        load = Load(order, done, arrived if order.overlaps else None)
        if order.overlaps:
            self._overlapping[order.request_id] = load
        self._running.add(load)
        self._access.store.io.submit(self._run(load))
        return load

    def raise_floor(self, request_id: int, num_tokens: int) -> None:
        """Keeps the load of `request_id`, if one runs, from writing before `num_tokens`.

        The details are those of `Load.raise_floor`.
        """
        if (load := self._overlapping.get(request_id)) is not None:
            load.raise_floor(num_tokens, self.tokens_per_block)
            self._access.store.io.call_soon(load.news.set)

    def times(self) -> dict[int, list[tuple[int, float]]]:
        """Returns the progress of loads beside computing since the last call: tokens, seconds."""
        return {
            request_id: [
                (load.order.loaded_from(num_blocks, self.tokens_per_block), seconds)
                for num_blocks, seconds in load.take_times()
            ]
            for request_id, load in self._overlapping.items()
        }

    def progress(self) -> dict[int, int]:
        """Returns for each load beside computing the token from which on all are in the pool.

        A load that has ended is returned once more.
        """
        came_to = {}
        for request_id, load in list(self._overlapping.items()):
            if load.ended:
                del self._overlapping[request_id]
            num_blocks = load.num_valid_blocks()
            came_to[request_id] = load.order.loaded_from(num_blocks, self.tokens_per_block)
        return came_to

    def cancel(self, request_id: int | None = None) -> None:
        """Cancels the load of `request_id`, or every load; each ends soon. On any thread.

        No further copy into the pool starts, even if the loop is stuck.
        """
        for load in list(self._running):
            if request_id in (None, load.order.request_id):
                load.cancelled = True  # before it closes, or its end would count as a failure
                load.closed = True
        self._access.store.io.call_soon(self._wake_all)

    def _slots_freed(self) -> None:
        if self._running:
            self._access.store.io.call_soon(self._wake_all)

    def _wake_all(self) -> None:
        for load in list(self._running):
            load.news.set()

    async def _run(self, load: Load) -> None:
        deadline = asyncio.get_running_loop().time() + self._timeout_s
        try:
            await self._fetch(load, deadline)
        finally:
            self._running.discard(load)
        with load.placing:
            had_ended, load.ended = load.ended, True
        if not had_ended:  # otherwise a copy thread has reported the end
            self._report(load)

    def _report(self, load: Load) -> None:
        order, num_blocks = load.order, load.num_valid_blocks()
        count("connector.load.blocks", blocks=num_blocks, missing=max(0, load.wanted - num_blocks))
        if (num_blocks < load.wanted or load.stop < len(order.blocks)) and not load.cancelled:
            valid = order.start
            if not order.overlaps:
                valid = order.num_valid(num_blocks, self.tokens_per_block)
            load.failure = TransferFailure(
                order.request_id, Direction.LOAD, valid, load.reason, loss=load.loss
            )
        self._note_lost(load)
        load.done(load)

    def _note_lost(self, load: Load) -> None:
        # A lost block is saved anew, also if it was computed meanwhile, or its load was cancelled.
        lost = load.order.overlaps and load.loss in (Outcome.EVICTED, Outcome.DAMAGED)
        if lost and load.ended and not load.failure:
            first = load.order.start // self.tokens_per_block
            self._access.lost.append((load.order.request_id, first))

    async def _fetch(self, load: Load, deadline: float) -> None:
        """Runs the load until every block is in the pool, or no more blocks can be."""
        loop = asyncio.get_running_loop()
        heard = loop.time()
        while not (load.closed or load.complete):
            load.news.clear()
            self._start_reads(load)
            if not load.reading and load.next >= min(load.stop, load.wanted):
                break
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + _LOOK_S)):
                    await load.news.wait()
                heard = loop.time()
            except TimeoutError:
                if loop.time() >= deadline:
                    load.close(f"not done within {self._timeout_s:g} s", Outcome.LATE)
                elif not self._access.store.backend.available:
                    load.close("the store does not answer any more")
                elif loop.time() - heard >= _STALL_S:
                    self._start_probe()
        while load.copying:
            load.news.clear()
            await load.news.wait()

    def _start_probe(self) -> None:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.get_running_loop().create_task(self._probe())

    async def _probe(self) -> None:
        with suppress(RetryLater):  # the breaker counts the outcome
            await self._access.store.backend.probe(_PROBE_S)
        await asyncio.sleep(_STALL_S)

    def _start_reads(self, load: Load) -> None:
        stop = min(load.stop, load.wanted)
        fine = load.order.overlaps and not load.order.alone
        # Pieces that arrived are copied while the next ones come. A short load makes smaller calls.
        piece, at_once = self._access.call_blocks, LOADS_IN_FLIGHT
        if stop <= 2 * piece * at_once:
            piece, at_once = max(1, piece // _SHORT_SHARE), _SHORT_IN_FLIGHT
            if fine and self._calls.hiding(piece) == piece:
                at_once = LOADS_IN_FLIGHT * _SHORT_SHARE  # hides the time of answers
        while (
            load.next < stop
            and load.reading < at_once
            and load.reading + load.copying < 2 * at_once
        ):
            size = self._fine(load, piece) if fine else piece
            slots = self._access.staging.take(Direction.LOAD, min(size, stop - load.next))
            if not slots:
                return
            read = asyncio.get_running_loop().create_task(self._read(load, load.next, slots))
            self._reads.add(read)
            read.add_done_callback(self._reads.discard)
            load.next += len(slots)
            load.reading += 1

    def _fine(self, load: Load, most: int) -> int:
        """Returns the blocks of the next call of a load beside which tokens are computed."""
        num_blocks = len(load.order.blocks)
        if not load.next and num_blocks > _FINE_PIECES:
            return 1  # measures the time of an answer
        return min(most, max(-(-num_blocks // _FINE_PIECES), self._calls.hiding(most)))

    async def _read(self, load: Load, first: int, slots: list[int]) -> None:
        """Reads one piece from the store into `slots`, then copies it to the pool."""
        order = load.order
        blocks = order.blocks[first : first + len(slots)]
        step = -1 if order.overlaps else 1  # stores read the blocks of a prompt in order
        pending: Future[None] | None = None
        started = asyncio.get_running_loop().time()
        try:
            try:
                filled = await self._access.fetch(blocks[::step], slots[::step])
            finally:
                load.reading -= 1
                load.copying += 1
                load.news.set()
            self._calls.record(filled, asyncio.get_running_loop().time() - started)
            if filled < len(slots):
                loss = self._access.loss_of(blocks[::step][filled])
                filled = 0 if order.overlaps else filled
                load.fail(first + filled, "a block is gone from the store, or was damaged", loss)
                self._note_lost(load)
            if filled and not load.closed:
                copy = partial(self._copy_now, load, first, slots, filled)
                await self._access.store.copying.run(copy)
        except BackendTimeout as error:
            pending = error.pending
            load.fail(first, str(error), Outcome.LATE)
        except KvConnectError as error:
            load.fail(first, str(error))
        finally:
            load.copying -= 1
            load.news.set()
            self._access.staging.give_back(Direction.LOAD, slots, pending)

    def _copy_now(self, load: Load, first: int, slots: list[int], filled: int) -> None:
        """Copies the first `filled` of `slots` into the pool, and frees them; on a copy thread.

        Only the load uses its blocks. The load ends here if these were its last ones: the engine
        does not wait for a turn of the loop.
        """
        copied = 0
        blocks = load.order.blocks[first : first + filled]
        for batch in copy_batches(blocks):
            with load.placing:
                part = slice(batch.start, min(batch.stop, load.wanted - first))
                if load.closed or part.stop <= part.start:
                    break
                ids = [block.block_id for block in blocks[part]]
                group = blocks[part.start].group
                self._access.copiers[group].copy_in(slots[part], ids)
                if load.order.overlaps:
                    self._access.wait_for_copies_in({group})
            copied = part.stop
        self._access.wait_for_copies_in({block.group for block in blocks})
        arrived, slots[:filled] = slots[:filled], []
        self._access.staging.give_back(Direction.LOAD, arrived)
        if load.note_copied(first, copied):
            self._report(load)
        elif load.arrived is not None:
            load.arrived()
