"""Copies through a buffer: the buffers, and the tables of both halves of such a copy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from kvconnect.kernels.blocks.runs import Runs, RunTable
from kvconnect.kernels.blocks.transfer import CopyEvent
from kvconnect.kernels.blocks.work import BlockCopy
from kvconnect.kernels.cuda.copy_policy import Direction
from kvconnect.kernels.cuda.driver.interface import Memory

__all__ = ["Ring", "Slot", "Staging", "staging_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Staging:
    """The two halves of a copy: from the source to a buffer, and from the buffer to the target.

    In the buffer blocks follow each other, and the runs of a block have the order that they have in
    host memory. So a contiguous piece of host memory is one run of the buffer.

    Attributes:
        first: the runs from the source to the buffer.
        second: the runs from the buffer to the target.
        nbytes: the size of a block in the buffer.
    """

    first: RunTable
    second: RunTable
    nbytes: int

    def halves(self, copy: BlockCopy, buffer: int) -> tuple[BlockCopy, BlockCopy]:
        """Returns both halves of `copy`, with the buffer at address `buffer`."""
        rows = np.arange(len(copy), dtype=np.int64)
        target = copy.target._replace(address=buffer, ids=rows)
        source = copy.source._replace(address=buffer, ids=rows)
        return (
            replace(copy, table=self.first, target=target),
            replace(copy, table=self.second, source=source),
        )


def staging_of(copy: BlockCopy, direction: Direction) -> Staging:
    """Returns the two halves for the runs of `copy`, from the cache of its table if possible."""
    kept = copy.table.kept.get(direction)
    if kept is None:
        on_host = "source_offset" if direction is Direction.LOAD else "target_offset"
        kept = copy.table.kept.setdefault(direction, _staging(copy.table.runs, on_host))
    return cast("Staging", kept)


def _staging(runs: Runs, on_host: str) -> Staging:
    runs = runs[np.argsort(runs[on_host], kind="stable")]
    sizes = runs["nbytes"]
    in_buffer, total = np.cumsum(sizes) - sizes, int(sizes.sum())
    first, second = runs.copy(), runs.copy()
    first["target_offset"], first["target_step"] = in_buffer, total
    second["source_offset"], second["source_step"] = in_buffer, total
    return Staging(RunTable((), first), RunTable((), second), total)


class Slot:
    """A buffer of a ring, and the event of its last use."""

    __slots__ = ("event", "memory")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.event: CopyEvent | None = None

    def wait_on_stream(self, stream: Any) -> None:
        """Makes later work of `stream` wait until the last use has ended. Does not block."""
        if self.event is not None:
            self.event.wait(stream)

    def wait(self) -> None:
        """Blocks the calling thread until the last use has ended."""
        if self.event is not None:
            self.event.synchronize()
            self.event = None


class Ring:
    """A fixed number of buffers, used in turn. Memory is allocated when it is first needed.

    The caller that takes a slot waits for its last use and stores its own event in the slot before
    another caller takes one: it holds `lock` meanwhile.

    Args:
        allocate: allocates memory of the given number of bytes.
        num_slots: the number of buffers, at least 1.
        slot_nbytes: the size of a new buffer, unless `take` needs more; also an attribute.
    """

    def __init__(self, allocate: Callable[[int], Memory], num_slots: int, slot_nbytes: int) -> None:
        self.lock = threading.Lock()
        self._allocate = allocate
        self._slots: list[Slot | None] = [None] * num_slots
        self.slot_nbytes = slot_nbytes
        self._next = 0

    def take(self, nbytes: int) -> Slot:
        """Returns the next slot, of at least `nbytes`. The caller holds `lock`.

        A slot that is too small is replaced by a larger one; that blocks until its last use has
        ended.
        """
        at = self._next
        self._next = (at + 1) % len(self._slots)
        slot = self._slots[at]
        if slot is None or slot.memory.nbytes < nbytes:
            if slot is not None:
                slot.wait()  # its memory is freed now
            slot = Slot(self._allocate(max(nbytes, self.slot_nbytes)))
            self._slots[at] = slot
        return slot
