"""The store's loop and threads: they end, also while something in them is stuck."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress

import pytest

from kvconnect.backends.daemon_threads import DaemonThreads
from kvconnect.connector.io.io_loop import IoLoop
from kvconnect.errors import UsageError


def test_coroutines_run_on_the_loops_thread() -> None:
    loop = IoLoop("test-io")

    async def where() -> str:
        return threading.current_thread().name

    assert loop.submit(where()).result(60) == "test-io"
    loop.close()
    loop.close()
    with pytest.raises(UsageError, match="closed"):
        loop.submit(where())
    loop.call_soon(lambda: None)  # too late, and harmless


@contextmanager
def held_up(loop: IoLoop) -> Iterator[None]:
    """The loop does nothing meanwhile."""
    entered, goes_on = threading.Event(), threading.Event()
    loop.call_soon(lambda: entered.set() or goes_on.wait(60))
    assert entered.wait(60)
    try:
        yield
    finally:
        goes_on.set()


@pytest.fixture(params=[True, False], ids=["eventfd", "socket"])
def loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[IoLoop]:
    monkeypatch.setattr("kvconnect.connector.io.io_loop._HAS_EVENTFD", request.param)
    made = IoLoop()
    yield made
    made.close()


def test_a_reply_is_waited_for_no_longer_than_asked(loop: IoLoop) -> None:
    with held_up(loop):
        reply = loop.submit(asyncio.sleep(0, "late"))
        with pytest.raises(TimeoutError):
            reply.result(0.01)
        assert not reply.done()
    assert reply.result(60) == "late"
    assert reply.done()
    assert reply.exception() is None


def test_replies_come_in_the_order_of_the_questions(loop: IoLoop) -> None:
    begun = []

    async def begin(number: int) -> int:
        begun.append(number)
        return number

    replies = [loop.submit(begin(number)) for number in range(100)]
    assert [one.result(60) for one in replies] == begun == list(range(100))


def test_a_reply_tells_the_error(loop: IoLoop) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    reply = loop.submit(fail())
    assert isinstance(reply.exception(60), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        reply.result()


def test_what_is_cancelled_before_it_begins_never_does(loop: IoLoop) -> None:
    begun = []

    async def begin() -> None:
        begun.append(1)

    with held_up(loop):
        reply = loop.submit(begin())
        reply.cancel()
        assert reply.done()
    assert loop.submit(asyncio.sleep(0, "next")).result(60) == "next"
    assert not begun
    with pytest.raises(CancelledError):
        reply.result()


def test_what_is_cancelled_while_it_runs_is_told(loop: IoLoop) -> None:
    entered, told = threading.Event(), threading.Event()

    async def wait() -> None:
        entered.set()
        try:
            await asyncio.sleep(60)
        finally:
            told.set()

    reply = loop.submit(wait())
    assert entered.wait(60)
    reply.cancel()
    assert told.wait(60)
    with pytest.raises(CancelledError):
        reply.exception()
    loop.submit(asyncio.sleep(0)).result(60)
    assert not loop._tasks


def test_what_comes_as_the_loop_is_closed_is_cancelled(monkeypatch) -> None:
    monkeypatch.setattr(IoLoop, "_woken", lambda _: None)  # it ends before it sees this
    loop = IoLoop()
    reply = loop.submit(asyncio.sleep(60))
    loop.close()
    with pytest.raises(CancelledError):
        reply.result(60)


def test_what_ends_in_the_loops_last_turn_is_told() -> None:
    io = IoLoop("test-io")

    async def last() -> int:
        io.loop.stop()  # as `close` does, just then
        return 7

    try:
        assert io.submit(last()).result(60) == 7
    finally:
        io.close()


DESCRIPTORS = """
import asyncio, gc

from kvconnect.connector.io.io_loop import IoLoop
from kvconnect.testing.processes.usage import descriptors

gc.collect()
before = descriptors()
for _ in range(3):
    loop = IoLoop()
    loop.submit(asyncio.sleep(0)).result(60)
    loop.close()
del loop
gc.collect()
print(descriptors() - before)
"""


def test_no_descriptor_is_left() -> None:
    """In a process of its own, in which nothing else opens and closes."""
    run = subprocess.run([sys.executable, "-c", DESCRIPTORS], stdout=subprocess.PIPE, check=True)
    assert int(run.stdout) <= 0


def test_what_is_submitted_while_the_loop_is_closed_is_cancelled(loop: IoLoop, monkeypatch) -> None:
    begin_all = loop._begin_all

    class Closing(deque):
        def append(self, one: object) -> None:
            loop.close()  # by another thread, after `submit` has looked
            super().append(one)

    monkeypatch.setattr(loop, "_submitted", Closing())
    reply = loop.submit(asyncio.sleep(60))
    with pytest.raises(CancelledError):
        reply.result(60)
    begin_all()  # closes the coroutine


@pytest.mark.parametrize("what", ["thread", "coroutine"])
def test_closing_does_not_wait_for_what_never_ends(what: str) -> None:
    loop = IoLoop()
    stuck, entered = threading.Event(), threading.Event()

    async def refuse_to_end() -> None:
        for _ in range(3):
            with suppress(asyncio.CancelledError):
                entered.set()
                await asyncio.sleep(60)

    in_a_thread = asyncio.to_thread(lambda: entered.set() or stuck.wait(60))
    loop.submit(in_a_thread if what == "thread" else refuse_to_end())
    assert entered.wait(60)
    started = time.monotonic()
    loop.close()
    assert time.monotonic() - started < 30
    stuck.set()
    in_a_thread.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_task_of_a_store_does_not_end_the_loop(error: type[BaseException]) -> None:
    loop = IoLoop()
    tasks = []

    async def leave() -> None:
        raise error

    async def begin() -> None:
        tasks.append(asyncio.create_task(leave()))

    loop.submit(begin()).result(60)
    assert loop.submit(asyncio.sleep(0, "works")).result(60) == "works"
    with pytest.raises(error):
        tasks[0].result()
    loop.call_soon(tasks.clear)
    loop.close()
    assert not loop._thread.is_alive()


def test_threads_are_daemons_and_bounded() -> None:
    pool = DaemonThreads(3, "test-pool")
    go = threading.Event()
    work = [pool.submit(go.wait, 60) for _ in range(9)]
    threads = [one for one in threading.enumerate() if one.name.startswith("test-pool")]
    assert len(threads) == 3
    assert all(one.daemon for one in threads)
    go.set()
    assert all(one.result(60) for one in work)
    pool.end(5)


def test_an_idle_thread_is_used_again() -> None:
    pool = DaemonThreads(8, "test-pool")
    for _ in range(20):
        assert pool.submit(lambda: 1).result(60) == 1
        while not pool._idle:  # its result is there a moment before the thread is
            time.sleep(0)
    assert sum(one.name.startswith("test-pool") for one in threading.enumerate()) == 1
    pool.end(5)


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_where_no_more_threads_are_to_be_had_those_there_are_do_the_work(monkeypatch) -> None:
    pool = DaemonThreads(2, "test-pool")
    go, entered = threading.Event(), threading.Event()
    first = pool.submit(lambda: entered.set() or go.wait(60))
    assert entered.wait(60)
    refuse_threads(monkeypatch)
    second = pool.submit(lambda: 2)
    go.set()
    assert first.result(60)
    assert second.result(60) == 2
    pool.end(5)


def test_work_that_is_refused_is_never_done(monkeypatch) -> None:
    pool = DaemonThreads(2, "test-pool")
    done = []
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.submit(lambda: done.append("refused"))
    pool.submit(lambda: done.append("taken")).result(60)
    pool.end(5)
    assert done == ["taken"]


def test_what_is_cancelled_while_all_threads_are_stuck_is_forgotten() -> None:
    pool = DaemonThreads(1, "test-pool")
    go, entered = threading.Event(), threading.Event()
    stuck = pool.submit(lambda: entered.set() or go.wait(60))
    assert entered.wait(60)
    first, kept = pool.submit(lambda: 1), pool.submit(lambda: 2)
    for _ in range(100):
        assert pool.submit(lambda: 3).cancel()
    assert first.cancel()
    assert len(pool._work) == 1
    go.set()
    assert stuck.result(60)
    assert kept.result(60) == 2
    pool.end(5)


def test_errors_reach_whoever_waits_and_the_thread_goes_on() -> None:
    pool = DaemonThreads(1, "test-pool")
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(60)
    assert pool.submit(lambda: 2).result(60) == 2
    pool.end(5)
    with pytest.raises(RuntimeError, match="ended"):
        pool.submit(lambda: 3)
