"""What our stores promise beyond `kvconnect.testing`."""

from __future__ import annotations

import threading

import pytest

from kvconnect.backends.guard.codecs import Codecs
from kvconnect.backends.guard.frames import Framing
from kvconnect.errors import BackendUnavailable

MIB = 1 << 20


async def test_closed_store_refuses_calls(make_bare, kit):
    store = make_bare()
    await store.open([kit.layout])
    await store.close()
    with pytest.raises(OSError, match=r"closed|not open"):
        await store.lookup([kit.key(1)])


async def test_first_blocks_are_the_children_of_nothing(make_bare, kit):
    root, full = kit.keys("children", count=2)
    async with kit.opened(make_bare()) as store:
        await store.save([kit.block(root, tokens=[1, 2]), kit.block(full, root, tokens=[3, 4])])
        assert [child.key for child in await store.children(None)] == [root]


async def test_threads_that_run_out_after_the_first_call_harm_nothing(make_bare, kit, monkeypatch):
    start = threading.Thread.start

    def refused(thread):
        if thread.name.startswith("kvconnect"):  # not those of the servers
            raise RuntimeError("can't start new thread")
        start(thread)

    async with kit.opened(make_bare()) as store:
        keys = kit.keys("no threads", count=3)
        assert await store.lookup(keys) == 0
        monkeypatch.setattr(threading.Thread, "start", refused)
        assert await store.save(kit.chain(keys)) == 3
        into = kit.buffers(3)
        assert await store.load(keys, into) == 3
        assert all(kit.holds(b, key) for b, key in zip(into, keys, strict=True))
        monkeypatch.undo()


async def test_frames_that_found_no_thread_are_not_touched_later(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    framing, done = Framing("store", Codecs(), verify=True), []
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(BackendUnavailable, match="more threads"):
        await framing._on_thread(lambda: done.append("late"), MIB)
    monkeypatch.undo()
    await framing._on_thread(lambda: done.append("in time"), MIB)
    assert done == ["in time"]
    framing.close()
    with pytest.raises(BackendUnavailable, match="closed"):
        await framing._on_thread(lambda: done.append("too late"), MIB)
