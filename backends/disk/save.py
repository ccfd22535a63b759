"""The save of a disk store: reserves slots, writes to them, then commits all of them at once."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress

from kvconnect.backend import StoredBlock
from kvconnect.backends.disk.directory import DiskDirectory
from kvconnect.backends.disk.errors import NO_SPACE, IndexDamaged, IndexFull, SegmentLost
from kvconnect.backends.disk.rows import Reservation
from kvconnect.backends.disk.writer import IndexWriter
from kvconnect.frame import FrameChecksum
from kvconnect.trace import count, warn_once


def save(
    directory: DiskDirectory,
    blocks: Sequence[StoredBlock],
    checksums: Sequence[FrameChecksum] = (),
) -> int:
    """Stores `blocks`, sealed by `checksums` if any; returns how many leading ones are stored.

    Blocks on the disk. Fewer are stored if the disk is full or read-only.

    Raises:
        OSError: the disk failed; none of the new blocks is stored.
        IndexDamaged: another program changed the index; none of the new blocks is stored.
    """
    writer = directory.writer
    if writer is None:
        return len(directory.find([block.key for block in blocks]))
    try:
        directory.flush()
        reservation = writer.reserve(blocks)
        return _store(directory, writer, reservation, checksums)
    except SegmentLost as lost:
        writer.drop_lost(lost.segment)
    except OSError as error:
        # An index with exhausted numbers or invalid slots raises this error, too.
        if isinstance(error, IndexFull) or error.errno == errno.EINVAL:
            writer.check()
        if error.errno not in NO_SPACE:
            raise
        count("store.disk.full")
        warn_once(
            f"disk.full.{directory.path}",
            f"disk store {directory.path}: {error}; blocks are not saved until there is space",
        )
    return 0


def _store(
    directory: DiskDirectory,
    writer: IndexWriter,
    reservation: Reservation,
    checksums: Sequence[FrameChecksum],
) -> int:
    if not reservation.new:
        return reservation.count
    try:
        buffers = [block.data for _, block, _ in reservation.new]
        seals = [checksums[at] for at, _, _ in reservation.new] if checksums else ()
        directory.files.write(reservation.locations, buffers, seals)
        if directory.settings.durability == "power":
            directory.files.sync(reservation.locations)
        directory.at("written")
        return writer.commit(reservation)
    except BaseException:
        # If this fails, too, the slots stay reserved until the next transaction.
        with suppress(OSError, IndexDamaged):
            writer.release(reservation)
        raise
