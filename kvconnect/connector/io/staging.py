"""The host memory for blocks on their way between pool and store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from weakref import WeakMethod

from torch import Tensor

from kvconnect import frame
from kvconnect.connector.data import Direction
from kvconnect.errors import ConfigurationError
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.pinned import PinnedPool
from kvconnect.layout import KvCacheLayout


class StagingPool:
    """The `staging_bytes` of slots that loads and saves share. Thread-safe.

    A slot is a number; `frame` returns its memory. Neither direction can take the last quarter of
    the slots from the other: a store that does not finish its saves must not stop loads, and the
    reverse. The slots used last are taken first: their memory is in the processor's caches, and a
    small load touches little of the region.

    Args:
        staging_bytes: upper bound of the region.
        payload_nbytes: the bytes of the payload of one block; the largest where pools differ.
        pin: page-lock the region (for copies from and to a GPU).
        loads_only: true if there are no saves, so that loads may use all slots.

    Raises:
        ConfigurationError: `staging_bytes` is below one slot.
    """

    def __init__(
        self,
        staging_bytes: int,
        payload_nbytes: int,
        *,
        pin: bool = False,
        loads_only: bool = False,
    ) -> None:
        slot_nbytes = frame.frame_nbytes(payload_nbytes)
        self.num_slots = staging_bytes // slot_nbytes
        if self.num_slots < 1:
            raise ConfigurationError(
                f"staging_bytes={staging_bytes}: one block takes {slot_nbytes} bytes; "
                "give at least that, better 64 times as much"
            )
        memory = PinnedPool(self.num_slots * slot_nbytes, slot_nbytes=slot_nbytes, pin=pin)
        self.region = memory.memory
        self.slot_nbytes = slot_nbytes
        reserved = 0 if loads_only else self.num_slots // 4
        self._limit = max(1, self.num_slots - reserved)
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._used = dict.fromkeys(Direction, 0)
        self._changed = threading.Condition()
        self._listeners: list[WeakMethod[Callable[[], None]]] = []

    def frame(self, slot: int, payload_nbytes: int | None = None) -> Tensor:
        """Returns the memory of `slot` for one frame, as a view: 1-D uint8, 4 KiB-aligned.

        Args:
            slot: the slot; its caller has taken it.
            payload_nbytes: the bytes of the payload; ``None``: those of the largest.
        """
        room = None if payload_nbytes is None else frame.frame_nbytes(payload_nbytes)
        start = slot * self.slot_nbytes
        return self.region[start : start + (room or self.slot_nbytes)]

    def paged(self, layout: KvCacheLayout) -> PagedKv:
        """Returns the payloads of all slots as blocks of `layout`, numbered like the slots."""
        _, layers, factor, elements = layout.flat_shape(1)
        payloads = frame.payload(self.region, self.region.numel() - frame.HEADER_NBYTES)
        flat = payloads[: payloads.numel() // layout.dtype.itemsize * layout.dtype.itemsize]
        step = self.slot_nbytes // layout.dtype.itemsize
        strides = (step, factor * elements, elements, 1)
        words = flat.view(layout.dtype)
        pool = words.as_strided((self.num_slots, layers, factor, elements), strides)
        return PagedKv.from_pool(pool, layout)

    @property
    def num_free(self) -> int:
        """The number of slots that are not used."""
        return len(self._free)

    def sizes(self) -> dict[str, float]:
        """Returns the bytes in use by each direction, and free, as gauges."""
        used = {one.value: self._used[one] * self.slot_nbytes for one in Direction}
        used["free"] = self.num_slots * self.slot_nbytes - sum(used.values())
        return {f"connector.staging.{name}": float(nbytes) for name, nbytes in used.items()}

    def take(self, direction: Direction, at_most: int) -> list[int]:
        """Returns up to `at_most` free slots, perhaps none, for the caller's use. Never blocks."""
        with self._changed:
            return self._take(direction, at_most)

    def take_within(self, direction: Direction, timeout_s: float) -> list[int]:
        """Returns one free slot, or none if none became free within `timeout_s`.

        Blocks the thread.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._available(direction) > 0, timeout_s)
            return self._take(direction, 1)

    def touch(self, num_slots: int) -> None:
        """Allocates the pages of up to `num_slots` slots, those that are taken first.

        Blocks the calling thread for some 2 ms for each MiB, as the first load into them would. The
        slots are taken meanwhile, and each is returned when its pages are allocated.
        """
        slots = self.take(Direction.LOAD, num_slots)
        while slots:
            slot = slots.pop()  # the one that `take` would use last
            self.frame(slot)[:: frame.ALIGNMENT].zero_()
            self.give_back(Direction.LOAD, [slot])

    def give_back(
        self, direction: Direction, slots: Sequence[int], after: Future[None] | None = None
    ) -> None:
        """Frees `slots`, taken for `direction`; with `after` once that is done.

        The caller must not access the slots afterwards.
        """
        if after is not None:
            after.add_done_callback(lambda _: self.give_back(direction, slots))
            return
        if not slots:
            return
        with self._changed:
            self._free.extend(slots)
            self._used[direction] -= len(slots)
            self._changed.notify_all()
        for reference in self._listeners:
            if (listener := reference()) is not None:
                listener()

    def on_free(self, listener: Callable[[], None]) -> None:
        """Adds `listener`, called whenever slots become free, on the thread that frees them.

        It is a bound method, and its object is not kept alive: a store that is stuck at the end may
        free slots later than that.
        """
        self._listeners.append(WeakMethod(listener))

    def _available(self, direction: Direction) -> int:
        return min(len(self._free), self._limit - self._used[direction])

    def _take(self, direction: Direction, at_most: int) -> list[int]:
        count = min(at_most, self._available(direction))
        if count <= 0:
            return []
        taken = self._free[-count:][::-1]
        del self._free[-count:]
        self._used[direction] += count
        return taken


def clear_beyond(payload: Tensor, layout: KvCacheLayout, num_tokens: int) -> None:
    """Zeroes a block's bytes past its first `num_tokens`, which hold KV of an earlier owner.

    `payload` is a 1-D uint8 host tensor of ``layout.block_nbytes``; changed in place.
    """
    elements = payload.view(layout.dtype)
    if layout.kv_factor == 2:
        planes = elements.view(layout.num_layers * 2, layout.tokens_per_block, -1)
        planes[:, num_tokens:].zero_()
        return
    planes = elements.view(layout.num_layers, layout.plane_elements)
    keys = layout.tokens_per_block * layout.num_kv_heads * layout.key_dim
    for part in (planes[:, :keys], planes[:, keys:]):
        if part.shape[1]:
            rows = part.shape[1] // layout.tokens_per_block
            part[:, num_tokens * rows :].zero_()
