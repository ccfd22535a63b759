"""The disk store's index, changed by SQL: values, rows, tables, before it is opened and after."""

from __future__ import annotations

import shutil
import sqlite3

import pytest
from disk_index import by_hand, loosen
from workload import Workload

from kvconnect.backends import open_backend
from kvconnect.backends.disk.damage import _COLUMNS

FORM = [pytest.param(24, id="quick"), pytest.param(300, id="long", marks=pytest.mark.slow)]
NUMBERS = [0, 1, -1, 7, 1 << 20, 1 << 31, 1 << 40, 1 << 61, (1 << 63) - 1, -(1 << 63)]


def value(chance, db):
    """A value of any type; also one that stands elsewhere in the index."""
    match chance.randrange(7):
        case 0 | 1:
            return chance.choice(NUMBERS)
        case 2:
            return chance.choice([0.5, 1.0, -1e300, float("inf"), 3e9])
        case 3:
            return chance.choice(["", "text", "0x10", "9" * 40, "1"])
        case 4:
            return chance.randbytes(chance.choice([0, 1, 4, 31, 32, 4000]))
        case 5:
            return None
    table = chance.choice(list(_COLUMNS))
    column = chance.choice(list(_COLUMNS[table]))
    found = db.execute(f"SELECT {column} FROM {table} ORDER BY random() LIMIT 1").fetchone()
    return found[0] if found else None


def deed(chance, db):
    """One change of the index."""
    table = chance.choice([*_COLUMNS, "blocks", "blocks", "segments"])
    column = chance.choice(list(_COLUMNS[table]))
    kind = chance.random()
    if kind < 0.7:
        which = chance.choice(["", f"WHERE abs(random()) % 2 AND {column} IS NOT NULL"])
        db.execute(f"UPDATE OR REPLACE {table} SET {column}=? {which}", (value(chance, db),))
    elif kind < 0.8:
        db.execute(f"DELETE FROM {table} WHERE abs(random()) % 2")
    elif kind < 0.9:
        row = [value(chance, db) for _ in _COLUMNS[table]]
        columns, marks = ",".join(_COLUMNS[table]), ",".join("?" * len(row))
        db.execute(f"INSERT OR REPLACE INTO {table}({columns}) VALUES({marks})", row)
    else:
        db.execute(
            chance.choice(
                [
                    f"DROP TABLE {table}",
                    "DROP INDEX blocks_by_use",
                    f"ALTER TABLE {table} RENAME COLUMN {column} TO other",
                    f"ALTER TABLE {table} ADD COLUMN other INTEGER",
                    f"CREATE TRIGGER t BEFORE INSERT ON {table} BEGIN SELECT RAISE(IGNORE); END",
                    f"CREATE TRIGGER t AFTER DELETE ON {table} BEGIN SELECT RAISE(ABORT, 'x'); END",
                    f"CREATE UNIQUE INDEX u ON {table}({column})",
                    "PRAGMA user_version=7",
                    "UPDATE sqlite_sequence SET seq=9223372036854775807",
                    "DELETE FROM sqlite_sequence",
                ]
            )
        )


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("tries", FORM)
async def test_index_that_somebody_changes_costs_blocks_and_nothing_else(tmp_path, tries):
    path, template = tmp_path / "store", tmp_path / "template"

    def make(deadline_s):
        return open_backend(f"disk:{path}?capacity=512KiB", deadline_s=deadline_s)

    work = Workload("disk index changed by SQL", make)
    await work.expect_recovery()
    shutil.copytree(path, template)
    for chance in work.tries(tries):
        shutil.rmtree(path)
        shutil.copytree(template, path)
        if chance.random() < 0.5:
            loosen(path)

        def attack(chance=chance):
            with by_hand(path) as db:
                for _ in range(chance.choice([1, 1, 2, 4])):
                    try:
                        deed(chance, db)
                        work.counts["deeds"] += 1
                    except (sqlite3.Error, OverflowError):
                        work.counts["deeds refused by SQLite"] += 1

        if chance.random() < 0.5:
            attack()
            await work.suffer(chance)
        else:
            await work.suffer(chance, during=attack)
        await work.expect_recovery()
