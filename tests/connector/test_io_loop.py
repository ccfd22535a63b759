"""The store's loop and threads: they end, also while something in them is stuck."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kvconnect.backends.daemon_threads import DaemonThreads
from kvconnect.connector.offload.io_loop import IoLoop
from kvconnect.errors import UsageError


def test_coroutines_run_on_the_loops_thread() -> None:
    loop = IoLoop("test-io")

    async def where() -> str:
        return threading.current_thread().name

    assert loop.submit(where()).result(5) == "test-io"
    loop.close()
    loop.close()
    with pytest.raises(UsageError, match="closed"):
        loop.submit(where())
    loop.call_soon(lambda: None)  # too late, and harmless


def test_closing_does_not_wait_for_what_never_ends() -> None:
    loop = IoLoop()
    stuck, entered = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        stuck.wait(20)

    loop.submit(asyncio.to_thread(wait))
    assert entered.wait(5)
    started = time.monotonic()
    loop.close()
    assert time.monotonic() - started < 2
    stuck.set()


def test_closing_does_not_wait_for_a_coroutine_that_refuses_to_end() -> None:
    loop = IoLoop()
    entered = threading.Event()

    async def stubborn() -> None:
        for _ in range(3):
            try:
                entered.set()
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue

    loop.submit(stubborn())
    assert entered.wait(5)
    started = time.monotonic()
    loop.close()
    assert time.monotonic() - started < 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_task_of_a_store_does_not_end_the_loop(error: type[BaseException]) -> None:
    loop = IoLoop()
    tasks = []

    async def leave() -> None:
        raise error

    async def begin() -> None:
        tasks.append(asyncio.create_task(leave()))

    loop.submit(begin()).result(5)
    assert loop.submit(asyncio.sleep(0, "works")).result(5) == "works"
    with pytest.raises(error):
        tasks[0].result()
    loop.call_soon(tasks.clear)
    loop.close()
    assert not loop._thread.is_alive()


def test_threads_are_daemons_and_bounded() -> None:
    pool = DaemonThreads(3, "test-pool")
    go = threading.Event()
    before = threading.active_count()
    work = [pool.submit(go.wait, 10) for _ in range(9)]
    assert threading.active_count() - before == 3
    assert all(one.daemon for one in threading.enumerate() if one.name.startswith("test-pool"))
    go.set()
    assert all(one.result(10) for one in work)
    pool.end(5)


def test_an_idle_thread_is_used_again() -> None:
    pool = DaemonThreads(8, "test-pool")
    for _ in range(20):
        assert pool.submit(lambda: 1).result(5) == 1
        time.sleep(0)
    assert sum(one.name.startswith("test-pool") for one in threading.enumerate()) <= 3
    pool.end(5)


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_where_no_more_threads_are_to_be_had_those_there_are_do_the_work(monkeypatch) -> None:
    pool = DaemonThreads(2, "test-pool")
    go, entered = threading.Event(), threading.Event()
    first = pool.submit(lambda: entered.set() or go.wait(20))
    assert entered.wait(5)
    refuse_threads(monkeypatch)
    second = pool.submit(lambda: 2)
    go.set()
    assert first.result(5)
    assert second.result(5) == 2
    pool.end(5)


def test_work_that_is_refused_is_never_done(monkeypatch) -> None:
    pool = DaemonThreads(2, "test-pool")
    done = []
    with monkeypatch.context() as patch:
        refuse_threads(patch)
        with pytest.raises(RuntimeError, match="new thread"):
            pool.submit(lambda: done.append("refused"))
    pool.submit(lambda: done.append("taken")).result(5)
    pool.end(5)
    assert done == ["taken"]


def test_what_is_cancelled_while_all_threads_are_stuck_is_forgotten() -> None:
    pool = DaemonThreads(1, "test-pool")
    go, entered = threading.Event(), threading.Event()
    stuck = pool.submit(lambda: entered.set() or go.wait(20))
    assert entered.wait(5)
    first, kept = pool.submit(lambda: 1), pool.submit(lambda: 2)
    for _ in range(100):
        assert pool.submit(lambda: 3).cancel()
    assert first.cancel()
    assert len(pool._work) == 1
    go.set()
    assert stuck.result(5)
    assert kept.result(5) == 2
    pool.end(5)


def test_errors_reach_whoever_waits_and_the_thread_goes_on() -> None:
    pool = DaemonThreads(1, "test-pool")
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(5)
    assert pool.submit(lambda: 2).result(5) == 2
    pool.end(5)
    with pytest.raises(RuntimeError, match="ended"):
        pool.submit(lambda: 3)
