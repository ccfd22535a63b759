"""The index of a disk store, changed by hand as whoever may write to the directory could."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from kvconnect.backends.disk.format import INDEX_NAME


@contextmanager
def by_hand(directory: Path) -> Iterator[sqlite3.Connection]:
    """A connection whose changes are committed at the end."""
    with closing(sqlite3.connect(directory / INDEX_NAME)) as db:
        yield db
        db.commit()


def loosen(directory: Path) -> None:
    """Let the tables take values of any type, as those of older versions do; nobody has it open."""
    with by_hand(directory) as db:
        db.execute("PRAGMA writable_schema=ON")
        for strict, loose in ((") WITHOUT ROWID, STRICT", ") WITHOUT ROWID"), (") STRICT", ")")):
            db.execute("UPDATE sqlite_schema SET sql=replace(sql, ?, ?)", (strict, loose))
        db.execute("PRAGMA writable_schema=RESET")
