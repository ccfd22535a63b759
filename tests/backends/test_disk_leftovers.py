"""The search of the disk store for unused bytes: of slots, those behind aligned writes."""

from __future__ import annotations

import sqlite3

from kvconnect.backends.disk.files.direct_io import aligned_size
from kvconnect.backends.disk.leftovers import Leftovers

UNIT = aligned_size(1)


def test_the_unused_end_of_a_slot_begins_where_aligned_writes_end():
    size = 3 * UNIT
    lengths = [0, 1, UNIT - 1, UNIT, UNIT + 1, 2 * UNIT, 2 * UNIT + 1, size]
    with sqlite3.connect(":memory:") as db:
        db.execute("CREATE TABLE segments (id, size, slots)")
        db.executemany("INSERT INTO segments VALUES (?, ?, 8)", [(1, size), (2, UNIT)])
        db.execute("CREATE TABLE free (segment, slot)")
        db.execute("CREATE TABLE blocks (id INTEGER PRIMARY KEY, segment, slot, length)")
        blocks = [(1, slot, length) for slot, length in enumerate(lengths)]
        blocks += [(2, slot, length) for slot, length in enumerate([0, 1, UNIT])]
        db.executemany("INSERT INTO blocks (segment, slot, length) VALUES (?, ?, ?)", blocks)
        found = Leftovers(db).following()
    starts = {(where.segment, where.slot): start for where, start in found}
    assert starts == {
        (1, slot): aligned_size(length)
        for slot, length in enumerate(lengths)
        if aligned_size(length) < size
    }
