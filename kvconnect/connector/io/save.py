"""The saves: pool to staging to store, several batches at a time, in the background."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from kvconnect.backend import StoredBlock
from kvconnect.connector.data import Direction
from kvconnect.connector.io.access import SAVES_IN_FLIGHT, Access
from kvconnect.connector.io.orders import BlockSave, SaveOrder
from kvconnect.connector.io.staging import clear_beyond
from kvconnect.errors import BackendTimeout, KvConnectError
from kvconnect.frame import payload
from kvconnect.kernels.blocks.transfer import Transfer
from kvconnect.keys import model_tag
from kvconnect.trace import count, warn_once


@dataclass(frozen=True, slots=True, eq=False)
class _Staged:
    """A block that is copied out of the pool; the copy has ended once `copied` is done."""

    request_id: int
    number: int
    block: StoredBlock
    slot: int
    copied: Transfer


class SaveQueue:
    """The blocks between the pool and the store; never more than the staging memory holds.

    `stage` belongs to the engine's thread, writing to the store's loop. Blocks are written in the
    order they were staged, parents before children, a few batches at a time.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        llm_args = access.store.llm_args
        self._model = model_tag(llm_args.model_digest, [one.layout_of(1) for one in access.heads])
        self._staged: deque[_Staged] = deque()
        self._writing = 0
        self._writes: set[asyncio.Task[None]] = set()
        self._unwritten = 0
        self._changed = threading.Condition()

    def stage(
        self,
        order: SaveOrder,
        *,
        stream: torch.cuda.Stream | None = None,
        timeout_s: float = 0.0,
    ) -> int:
        """Copies the blocks of `order` to staging slots; the loop writes them from there.

        The copied blocks may be reused when this returns (on CUDA: `stream` waits for the copies).
        Blocks up to `timeout_s` for room.

        Returns:
            The number of leading blocks that were staged.
        """
        blocks = tuple(order.blocks)
        deadline = time.monotonic() + timeout_s
        staged = 0
        while staged < len(blocks):
            slots = self._access.staging.take(Direction.SAVE, len(blocks) - staged)
            if not slots and (left := deadline - time.monotonic()) > 0:
                slots = self._access.staging.take_within(Direction.SAVE, left)
            if not slots:
                break
            self._copy(order, blocks[staged : staged + len(slots)], slots, stream)
            staged += len(slots)
        return staged

    def flush(self, timeout_s: float) -> bool:
        """Blocks until all staged blocks are written or lost; false if `timeout_s` passes first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unwritten == 0, timeout_s)

    def drain(self, until: float) -> None:
        """Flushes until `until` on the monotonic clock; warns if blocks were not written."""
        if not self.flush(max(0.0, until - time.monotonic())):
            name = self._access.store.backend.name
            warn_once("connector.drain", f"{name}: not everything staged was saved")

    @staticmethod
    def count_dropped(num_blocks: int) -> None:
        """Counts blocks that were dropped for lack of staging memory."""
        if num_blocks:
            count("connector.save.dropped", blocks=num_blocks)
            warn_once(
                "connector.save.dropped",
                f"{num_blocks} blocks were not saved: the store is slower than the model and "
                "staging_bytes are used up",
            )

    # ------------------------------------------------------------------ on the engine's thread

    def _copy(
        self,
        order: SaveOrder,
        blocks: Sequence[BlockSave],
        slots: Sequence[int],
        stream: torch.cuda.Stream | None,
    ) -> None:
        copied: dict[int, Transfer] = {}
        for group in dict.fromkeys(block.group for block in blocks):
            own = [at for at, block in enumerate(blocks) if block.group == group]
            ids = [blocks[at].block_id for at in own]
            copied[group] = self._access.copiers[group].copy_out(
                ids, [slots[at] for at in own], stream
            )
        for block, slot in zip(blocks, slots, strict=True):
            stored = self._stored_block(order, block, slot)
            staged = _Staged(order.request_id, block.number, stored, slot, copied[block.group])
            self._staged.append(staged)
        with self._changed:
            self._unwritten += len(slots)
        self._access.store.io.call_soon(self._pump)

    def _stored_block(self, order: SaveOrder, block: BlockSave, slot: int) -> StoredBlock:
        return StoredBlock(
            key=self._access.store_key(block.key, block.group),
            data=self._access.frame(slot, block.group),
            parent=self._access.store_key(block.parent, block.group),
            tokens=block.tokens,
            priority=block.priority,
            namespace=order.namespace,
            model=self._model,
            group=block.group,
            expires_at=order.expires_at,
        )

    # ------------------------------------------------------------------ on the store's loop

    def _pump(self) -> None:
        while self._staged and self._writing < SAVES_IN_FLIGHT:
            size = min(self._access.call_blocks, len(self._staged))
            batch = [self._staged.popleft() for _ in range(size)]
            self._writing += 1
            write = asyncio.get_running_loop().create_task(self._write(batch))
            self._writes.add(write)
            write.add_done_callback(self._writes.discard)

    async def _write(self, batch: Sequence[_Staged]) -> None:
        stored = 0
        reason = "the store has no room"
        pending: Future[None] | None = None
        try:
            await self._complete(batch)
            stored = await self._access.store.backend.save([staged.block for staged in batch])
        except BackendTimeout as error:
            pending, reason = error.pending, str(error)
        except KvConnectError as error:
            reason = str(error)
        finally:
            self._writing -= 1
            self._end(batch, stored, reason, pending)
            self._pump()

    async def _complete(self, batch: Sequence[_Staged]) -> None:
        """Completes the payloads: waits for copies from a GPU, zeroes the unused end of tails."""
        for staged in batch:
            layout = self._access.copiers[staged.block.group].layout
            if not staged.copied.done():
                await asyncio.to_thread(staged.copied.wait)
            tokens = staged.block.tokens
            if tokens is not None and len(tokens) < layout.tokens_per_block:
                filled = payload(staged.block.data, layout.block_nbytes)
                clear_beyond(filled, layout, len(tokens))

    def _end(
        self, batch: Sequence[_Staged], stored: int, reason: str, pending: Future[None] | None
    ) -> None:
        lost = batch[stored:]
        if lost:
            count("connector.save.lost", blocks=len(lost))
            warn_once("connector.save.lost", f"{len(lost)} blocks were not stored: {reason}")
            self._access.lost.extend((staged.request_id, staged.number) for staged in lost)
        self._access.staging.give_back(Direction.SAVE, [staged.slot for staged in batch], pending)
        with self._changed:
            self._unwritten -= len(batch)
            self._changed.notify_all()
