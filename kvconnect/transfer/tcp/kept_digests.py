"""The digests of published memory, computed before a reader asks for its bytes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from kvconnect.transfer.reads import Offsets, Runs
from kvconnect.transfer.regions import Region, Regions, outside

MIN_CELL_NBYTES = 16 << 10
"""The smallest cell. Smaller ones would cost a reader more time in Python than in their hash."""

MAX_CELL_NBYTES = 256 << 10
"""The largest cell: few enough bytes to stay in a core's second cache."""

MAX_CELLS = 1 << 16
"""The most digests of one answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Leading:
    """The digests of the leading bytes of a request.

    Attributes:
        cell: the bytes under each digest; 0 without a digest.
        digests: uint64[n] little-endian, the xxh3-64 of each `cell` bytes, in order.
    """

    cell: int
    digests: npt.NDArray[np.uint64]

    @property
    def nbytes(self) -> int:
        """The bytes under all digests."""
        return self.cell * len(self.digests)


NO_DIGESTS = Leading(0, np.empty(0, "<u8"))


@dataclass(slots=True, eq=False)
class _Table:
    """The cells of a region.

    Attributes:
        cell: bytes of each.
        epochs: uint64[n], the lease under which the digest of a cell was computed; 0: none was.
        digests: uint64[n], the digests.
    """

    cell: int
    epochs: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint64]


class KeptDigests:
    """The digests of cells of host memory, each with the epoch of the lease that keeps its bytes.

    A source sends such bytes from their memory, without a copy and without a hash. That is safe
    although their owner could write to them:

    * While the lease lives, its owner does not write to them.
    * A digest is used only for a read under the epoch that it was computed for. An epoch is never
      used twice, so a block of a later prompt does not get the digest of an earlier prompt.
    * The reader hashes what it received. If other bytes were sent than those that were digested, it
      refuses them. So an outdated digest can make a read fail, and cannot make one succeed.

    Digests are computed on a thread of this object, one lease after the other. They take 16 bytes
    for each cell of a region, however many leases there are. A cell has one epoch: of leases that
    share a block, the latest has its digests. Thread-safe.
    """

    def __init__(self, regions: Regions) -> None:
        self._regions = regions
        self._lock = threading.Lock()
        self._tables: dict[int, _Table] = {}
        self._live: set[int] = set()
        self._worker = _worker()

    def keep(self, number: int, offsets: Offsets, nbytes: int, epoch: int) -> None:
        """Begins to digest pieces of a region, as `Transport.keep_digests` describes."""
        cell = _cell_of(nbytes)
        with self._lock:
            regions = self._regions.all()
            sizes = tuple(region.nbytes for region in regions)
            if not epoch or outside(sizes, number, offsets, nbytes) is not None:
                return  # the transport was closed
            region = regions[number]
            if not len(offsets) or not cell or not region.host:
                return
            table = self._tables.get(number)
            if table is None:
                cells = region.nbytes // cell
                table = _Table(cell, np.zeros(cells, np.uint64), np.zeros(cells, np.uint64))
                self._tables[number] = table
            if table.cell != cell or (offsets % cell).any():
                return
            self._live.add(epoch)
            self._worker.submit(self._digest, region, table, offsets.tolist(), nbytes, epoch)

    def drop(self, epoch: int) -> None:
        """Forgets the digests of a lease, as `Transport.drop_digests` describes."""
        with self._lock:
            self._live.discard(epoch)

    def leading(self, number: int, runs: Runs, epoch: int) -> Leading:
        """Returns the digests under `epoch` of as many leading bytes of `runs` as have one."""
        with self._lock:
            table = self._tables.get(number)
            if table is None or epoch not in self._live:
                return NO_DIGESTS
            index = _cells(runs, table.cell)
            known = table.epochs[index] == epoch
            count = len(known) if known.all() else int(known.argmin())
            return Leading(table.cell, table.digests[index[:count]]) if count else NO_DIGESTS

    def close(self) -> None:
        """Forgets all digests. Blocks until no thread reads the memory. Idempotent.

        The regions were cleared before, so that a `keep` on another thread begins nothing more.
        """
        with self._lock:
            self._live.clear()
            self._tables.clear()
            worker, self._worker = self._worker, _worker()
        worker.shutdown(cancel_futures=True)

    def _digest(
        self, region: Region, table: _Table, offsets: list[int], nbytes: int, epoch: int
    ) -> None:
        view, cell = region.view(), table.cell
        for offset in offsets:
            if epoch not in self._live:
                return
            begins = range(offset, offset + nbytes, cell)
            found = [xxh3_64_intdigest(view[begin : begin + cell]) for begin in begins]
            with self._lock:
                if epoch in self._live:
                    there = slice(offset // cell, offset // cell + len(found))
                    table.epochs[there], table.digests[there] = epoch, found


def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "kvconnect-tcp-digests")


def _cell_of(nbytes: int) -> int:
    """Returns the bytes of the cells that pieces of `nbytes` are divided into; 0: they are not."""
    for number in range(-(-nbytes // MAX_CELL_NBYTES), nbytes // MIN_CELL_NBYTES + 1):
        if nbytes % number == 0:
            return nbytes // number
    return 0


def _cells(runs: Runs, cell: int) -> Offsets:
    """Returns the numbers of the cells of leading `runs`, up to the first run of other bytes."""
    whole = (runs["offset"] % cell == 0) & (runs["nbytes"] % cell == 0)
    some = runs if whole.all() else runs[: int(whole.argmin())]
    ends = np.cumsum(some["nbytes"] // cell)
    at = np.arange(min(int(ends[-1]), MAX_CELLS) if len(some) else 0)
    run = np.searchsorted(ends, at, side="right")
    begins = some["offset"] // cell - (ends - some["nbytes"] // cell)
    found: Offsets = begins[run] + at
    return found
