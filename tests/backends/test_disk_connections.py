"""The disk store's connections to its index: used by one thread at a time, and all of them closed."""

from __future__ import annotations

import errno
import sqlite3
import threading
import weakref
from functools import partial

import pytest

from kvconnect.errors import BackendUnavailable


class Watched(sqlite3.Connection):
    """Knows its cursors."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.cursors = weakref.WeakSet()

    def execute(self, *arguments):
        return self.known(super().execute(*arguments))

    def executemany(self, *arguments):
        return self.known(super().executemany(*arguments))

    def known(self, cursor):
        self.cursors.add(cursor)
        return cursor


class WatchedLock:
    """In place of the lock of `one`, a reader or a writer: counts who leaves it, and with what."""

    def __init__(self, one):
        self.connection = one._db
        self.lock = threading.Lock()
        self.left = 0
        self.cursors = 0
        one._lock = self

    def __enter__(self):
        self.lock.acquire()

    def __exit__(self, *error):
        self.left += 1
        self.cursors += len(self.connection.cursors)
        self.lock.release()


@pytest.fixture
def opened(make_disk, kit, monkeypatch):
    """Opens stores whose connections know their cursors."""
    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=Watched))
    return lambda **options: kit.opened(make_disk(**options))


def watched(store):
    return [WatchedLock(store._directory._reader), WatchedLock(store._directory._writer)]


async def use(store, kit):
    """Each operation of a store, with blocks that are there, absent, in the way and dropped."""
    keys = kit.keys("used", count=6)
    assert await store.save(kit.chain(keys[:4])) == 4
    assert await store.save(kit.chain(keys)) == 6
    assert await store.lookup(keys) == 6
    assert await store.load(keys, kit.buffers(6)) == 6
    assert len([entry async for entry in store.scan()]) == 6
    await store.children(keys[0])
    await store.describe(keys)
    await store.stats()
    for turn in range(60):  # flushes what was used, grows, then drops older blocks
        await store.save(kit.chain(kit.keys(turn, count=4)))
    assert await store.lookup(keys) < 6
    await store.delete(keys)


async def test_no_cursor_outlives_the_lock_of_its_connection(opened, kit):
    async with opened(capacity=2 << 20, ttl=3600) as store:
        locks = watched(store)
        await use(store, kit)
        assert all(lock.left > 5 for lock in locks)
        assert [lock.cursors for lock in locks] == [0, 0]


@pytest.mark.parametrize("point", ["evicted", "committing"])
async def test_no_cursor_outlives_the_lock_of_a_transaction_that_fails(opened, kit, point):
    def fail(reached):
        if reached == point:
            raise OSError(errno.EIO, "fails here")

    async with opened(capacity=2 << 20) as store:
        locks = watched(store)
        store._directory._writer._at = store._directory._writer._slots._at = fail
        with pytest.raises(BackendUnavailable, match="fails here"):
            for turn in range(100):
                await store.save(kit.chain(kit.keys(turn, count=4)))
        assert [lock.cursors for lock in locks] == [0, 0]
