"""An index that is not what was written is started anew: no refusal, no traceback, no wrong block.

Nor a store that says yes to a save and does not find the block: what is saved after is found.
"""

from __future__ import annotations

import logging
import sqlite3
from contextlib import suppress

import pytest
from disk_index import by_hand, loosen
from test_disk_faults import nothing_was_warned_of  # noqa: F401 - a fixture for all

from kvconnect.backends import open_backend
from kvconnect.backends.disk.damage import _COLUMNS
from kvconnect.errors import BackendUnavailable

WRONG = {str: "text", bytes: b"blob", float: 1.5}
KINDS = {str: "text", bytes: "blob", float: "real"}


def wrong_values():
    """Table, column and value of each case; one of each column is quick, the others are slow."""
    for table, columns in _COLUMNS.items():
        for number, (column, kind) in enumerate(columns.items()):
            if column == "id":
                continue  # SQLite takes nothing but numbers there, in old tables, too
            # Text becomes of numbers that are put into a column of it.
            kinds = [bytes] if kind == "text" else list(WRONG)
            fit = [one for one in kinds if KINDS[one] not in kind]
            for at, one in enumerate(fit):
                marks = [] if at == number % len(fit) else [pytest.mark.slow]
                name = f"{table}.{column} {KINDS[one]}"
                yield pytest.param(table, column, WRONG[one], id=name, marks=marks)


VALUES = list(wrong_values())
DEEDS = {
    "a dropped table": "DROP TABLE segments",
    "a dropped column": "ALTER TABLE blocks DROP COLUMN tokens",
    "a trigger that ignores what is saved": (
        "CREATE TRIGGER t BEFORE INSERT ON blocks BEGIN SELECT RAISE(IGNORE); END"
    ),
    "a trigger that refuses what is saved": (
        "CREATE TRIGGER t BEFORE INSERT ON free BEGIN SELECT RAISE(ABORT, 'no'); END"
    ),
    "an index that lets in one block": "CREATE UNIQUE INDEX u ON blocks(parent)",
    "a view in the place of a table": "CREATE VIEW v AS SELECT * FROM blocks",
    "numbers that are used up": "UPDATE sqlite_sequence SET seq=9223372036854775807",
    "a row's number that is the last": "UPDATE blocks SET id=9223372036854775807 WHERE slot=1",
    "two blocks in one slot": "UPDATE blocks SET slot=1 WHERE slot=0",
    "a block in a slot that is free": "INSERT INTO free SELECT segment, slot FROM blocks LIMIT 1",
    "a block in a slot that is fresh": "UPDATE segments SET fresh=1",
    "slots before the first": "UPDATE segments SET fresh=-8",
}

SEEN_BY_ITS_EFFECT = {
    "a trigger that ignores what is saved",
    "numbers that are used up",
    "two blocks in one slot",
    "a block in a slot that is fresh",
    "slots before the first",
}
OPEN_DEEDS = {
    "a block that is another's": "UPDATE blocks SET slot=3-slot",
    "a file with fewer slots": "UPDATE segments SET slots=2",
    "a file that has no row": "DELETE FROM segments",
    "blocks that have no row": "DELETE FROM blocks",
    "blocks of no length": "UPDATE blocks SET length=0",
    "blocks of another size": "UPDATE blocks SET size=1",
    "slots that are free and used": "INSERT INTO free SELECT segment, slot FROM blocks",
}


async def filled(make_disk, kit, keys):
    async with kit.opened(make_disk()) as store:
        await store.save([kit.block(key, tokens=[1, 2]) for key in keys])
        writer = store._client.directory.writer
        with writer._transaction():
            for table, row in (("free", (1, 1)), ("reserved", ("of nobody", 1, 1, 2))):
                writer._db.execute(f"INSERT INTO {table} VALUES({','.join('?' * len(row))})", row)


async def expect_anew(make_disk, kit, keys, caplog):
    """The index was started anew with one warning, and all that is saved is found."""
    with caplog.at_level(logging.WARNING, "kvconnect"):
        async with kit.opened(make_disk()) as store:
            assert await store.lookup(keys) == 0
            assert [entry async for entry in store.scan()] == []
            assert await store.save(kit.chain(keys)) == len(keys)
            assert await kit.stored(store, keys) == [True] * len(keys)
        async with kit.opened(make_disk()) as store:
            assert await kit.stored(store, keys) == [True] * len(keys)
    assert [record for record in caplog.records if "it starts empty" in record.message]


@pytest.mark.parametrize(("table", "column", "value"), VALUES)
async def test_value_of_another_type_is_damage(make_disk, kit, path, caplog, table, column, value):
    keys = kit.keys("typed", count=4)
    await filled(make_disk, kit, keys)
    loosen(path)
    with by_hand(path) as db:
        one = "WHERE id=(SELECT min(id) FROM blocks)" if table == "blocks" else ""
        assert db.execute(f"UPDATE {table} SET {column}=? {one}", (value,)).rowcount == 1
    await expect_anew(make_disk, kit, keys, caplog)


@pytest.mark.parametrize("deed", DEEDS)
async def test_what_acts_on_the_tables_is_damage(make_disk, kit, path, caplog, deed):
    keys = kit.keys("deeds", count=4)
    await filled(make_disk, kit, keys)
    with by_hand(path) as db:
        db.execute(DEEDS[deed])
    await expect_anew(make_disk, kit, keys, caplog)


async def test_a_new_index_takes_no_value_of_another_type(make_disk, kit, path):
    await filled(make_disk, kit, kit.keys("strict", count=2))
    with by_hand(path) as db:
        for table, column, value in (one.values for one in VALUES):
            with pytest.raises(sqlite3.IntegrityError, match="cannot store"):
                db.execute(f"UPDATE {table} SET {column}=?", (value,))


@pytest.mark.parametrize(("table", "column", "value"), VALUES)
async def test_values_that_change_while_it_is_open_cost_no_more_than_the_blocks(
    make_disk, kit, path, table, column, value
):
    keys, more = kit.keys("under way", count=4), kit.keys("more", count=4)
    await filled(make_disk, kit, keys)
    loosen(path)
    async with kit.opened(make_disk(capacity=1 << 20)) as store:
        with by_hand(path) as db, suppress(sqlite3.IntegrityError):
            db.execute(f"UPDATE {table} SET {column}=?", (value,))
        for call in (
            lambda: store.lookup(keys),
            lambda: kit.stored(store, keys),
            lambda: store.save(kit.chain(more)),
            lambda: store.children(keys[0]),
            lambda: store.describe(keys),
            store.stats,
            lambda: store.delete(more),
        ):
            with suppress(BackendUnavailable):
                await call()
        with suppress(BackendUnavailable):
            _ = [entry async for entry in store.scan()]
    async with kit.opened(make_disk()) as store:
        await store.save(kit.chain(more))
        assert await kit.stored(store, more) == [True] * 4


@pytest.mark.parametrize("access", ["read", "maintain"])
async def test_who_only_looks_starts_nothing_anew(make_disk, kit, path, access):
    keys = kit.keys("looked at", count=4)
    await filled(make_disk, kit, keys)
    loosen(path)
    with by_hand(path) as db:
        db.execute("UPDATE blocks SET slot=1.5 WHERE slot=1")
    with pytest.raises(BackendUnavailable, match=r"damaged .*blocks\.slot"):
        await make_disk().open([], access)
    with by_hand(path) as db:
        assert db.execute("SELECT count(*) FROM blocks").fetchone() == (4,)


@pytest.mark.parametrize(
    "deed",
    [
        pytest.param(deed, marks=[] if deed in SEEN_BY_ITS_EFFECT else [pytest.mark.slow])
        for deed in [*DEEDS, *OPEN_DEEDS]
    ],
)
async def test_a_deed_that_is_done_while_it_is_open_is_over_before_it_is_opened_again(
    kit, path, deed
):
    keys = kit.keys("there", count=4)
    made = open_backend(f"disk:{path}?capacity=1MiB", deadline_s=30)
    async with kit.opened(made) as store:
        await store.save(kit.chain(keys))
        with by_hand(path) as db:
            db.execute({**DEEDS, **OPEN_DEEDS}[deed])
        keys += kit.keys("saved later", count=2)
        for _ in range(len(keys) + 2):  # a bad block is seen when those before it are good
            await store.save(kit.chain(keys))
            into = kit.buffers(len(keys))
            found = await store.load(keys, into)
            assert all(map(kit.holds, into[:found], keys))
        assert found == len(keys)
