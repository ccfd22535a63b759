"""The load of a disk store: finds the slots, reads them, checks that none was reused meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvconnect.backends.disk.directory import DiskDirectory
from kvconnect.backends.disk.errors import SegmentLost
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey

if TYPE_CHECKING:
    from torch import Tensor


def load(
    directory: DiskDirectory,
    keys: Sequence[BlockKey],
    into: Sequence[Tensor],
    checksums: Sequence[FrameChecksum] = (),
) -> int:
    """Fills `into`; returns how many leading buffers are filled. Blocks on the disk.

    `checksums`, one for each of `into` or none, hash the bytes as they arrive.

    Raises:
        OSError: the disk failed; `into` is undefined.
    """
    found = directory.find(keys)
    for at, (block, buffer) in enumerate(zip(found, into, strict=False)):
        if block.length > buffer.numel():
            del found[at:]
            break
    buffers = [buffer[: block.length] for block, buffer in zip(found, into, strict=False)]
    try:
        directory.files.read(found, buffers, checksums[: len(found)])
    except SegmentLost as lost:
        if directory.writer is not None:
            directory.writer.drop_lost(lost.segment)
        intact = next(at for at, block in enumerate(found) if block.segment == lost.segment)
        return load(directory, keys[:intact], into[:intact], checksums[:intact])
    # A slot may have been reused while it was read. Its row is deleted first, so if the row still
    # exists, the slot was unchanged during the read.
    del found[directory.reader.alive(found) :]
    directory.note_use(found, loaded=True)
    return len(found)
