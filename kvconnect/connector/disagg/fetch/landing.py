"""The memory in which reads arrive whose blocks may be computed meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import reduce
from math import gcd

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvconnect.transfer.reads import Reads

_SLOTS = 16
_SLOT_NBYTES = 4 << 20
LANDING_SHARE = 2 / _SLOTS
"""The share of the quarantine's limit that a slot counts as, if its read does not end."""


class Landing:
    """Slots of registered memory beside the pools, and the copies from there into a pool.

    A read that is under way cannot be kept from writing. So a block that its request may compute
    meanwhile is never the destination of a read: the read ends in a slot, and is copied only while
    the block is still wanted. A slot of a read that does not end stays taken.

    Args:
        memory: uint8[n], registered with the transport as `region`.
        region: the number of `memory` at the transport.
        pools: the memory of the pools by their regions, on the same device.
    """

    def __init__(self, memory: Tensor, region: int, pools: dict[int, Tensor]) -> None:
        self._memory = memory
        self._region = region
        self._pools = {
            number: pool.detach().reshape(-1).view(torch.uint8) for number, pool in pools.items()
        }
        self.slot_nbytes = len(memory) // _SLOTS
        self._lock = threading.Lock()
        self._free = list(range(_SLOTS))
        self._stream = torch.cuda.Stream(memory.device) if memory.is_cuda else None  # type: ignore[no-untyped-call]

    @staticmethod
    def memory_for(pools: Sequence[Tensor], largest_piece: int) -> Tensor:
        """Returns new memory for pieces of up to `largest_piece` bytes, on the device of `pools`.

        It has at most 64 MiB, and no more than a pool unless that is less than 16 pieces.
        """
        pool_nbytes = max(pool.numel() * pool.element_size() for pool in pools)
        slot = max(largest_piece, min(_SLOT_NBYTES, pool_nbytes // _SLOTS))
        return torch.empty(slot * _SLOTS, dtype=torch.uint8, device=pools[0].device)

    @property
    def num_free(self) -> int:
        """Returns the number of free slots."""
        return len(self._free)

    def take(self) -> int | None:
        """Returns a free slot, or ``None``. Callable on any thread."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        """Frees `slot`, into which no read writes any more. Callable on any thread."""
        with self._lock:
            self._free.append(slot)

    def into(self, slot: int, reads: Reads) -> Reads:
        """Returns `reads`, of at most `slot_nbytes`, with `slot` as their destination."""
        begin = slot * self.slot_nbytes
        offsets = begin + np.arange(len(reads.local_offsets), dtype=np.int64) * reads.nbytes
        return replace(reads, local_region=self._region, local_offsets=offsets)

    def copy(self, slot: int, reads: Reads, wanted: npt.NDArray[np.bool_]) -> None:
        """Copies the `wanted` pieces of `reads` from `slot` to their destinations in the pool.

        Blocks until the bytes are there, on a stream of its own.
        """
        if not wanted.any():
            return
        targets = reads.local_offsets[wanted]
        begin = slot * self.slot_nbytes
        landed = self._memory[begin : begin + reads.total_nbytes].view(-1, reads.nbytes)
        # Rows of the largest size at whose multiples all pieces begin.
        row = reduce(gcd, targets.tolist(), reads.nbytes)
        dtype, item = (torch.int64, 8) if row % 8 == 0 else (torch.uint8, 1)
        pool = self._pools[reads.local_region]
        rows = pool[: len(pool) // row * row].view(dtype).view(-1, row // item)
        first = torch.from_numpy(targets // row)
        count = reads.nbytes // row
        index = (first[:, None] + torch.arange(count)[None, :]).reshape(-1)
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            chosen = torch.from_numpy(wanted).to(landed.device)
            source = landed if wanted.all() else landed[chosen]
            rows.index_copy_(0, index.to(rows.device), source.view(dtype).reshape(-1, row // item))
        if self._stream is not None:
            self._stream.synchronize()
