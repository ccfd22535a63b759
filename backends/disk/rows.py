"""The rows of blocks in the disk store's index, and the slots that a save may write to."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.backend import StoredBlock
from kvconnect.backends.disk.files.direct_io import Location
from kvconnect.backends.disk.format import FOREVER
from kvconnect.backends.entries import end_of, tokens_to_bytes

INSERT = (
    "INSERT OR IGNORE INTO blocks(key, segment, slot, size, length, priority, created, used,"
    " parent, tokens, namespace, pool_group, model, expires)"
    " VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
"""The statement that inserts a row of `row_of`, unless its key exists."""


@dataclass(slots=True)
class Reservation:
    """The slots that a save may write to.

    Attributes:
        save: the number of the save among those of this owner.
        count: the number of leading blocks that are stored once `new` is written and committed.
        new: position in the save, block and slot of each block that is not stored yet.
    """

    save: int
    count: int
    new: list[tuple[int, StoredBlock, Location]]

    @property
    def locations(self) -> list[Location]:
        """The slots of `new`."""
        return [location for _, _, location in self.new]


def row_of(
    now: int, used: int, at: int, block: StoredBlock, location: Location
) -> tuple[object, ...]:
    """Returns the row of `block`, which is number `at` of its save, stored `now` at `location`."""
    return (
        block.key,
        location.segment,
        location.slot,
        location.size,
        block.data.numel(),
        block.priority,
        now,
        used - at,  # the end of a chain is older than its beginning, so it is dropped first
        block.parent,
        None if block.tokens is None else tokens_to_bytes(block.tokens),
        block.namespace,
        block.group,
        block.model,
        FOREVER if (end := end_of(block)) is None else round(end * 1e6),
    )
