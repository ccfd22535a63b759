"""Threads for blocking work: a call ends only when its thread has, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from kvconnect.backends.lanes import Lane, Lanes, settled
from kvconnect.errors import BackendUnavailable


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane("lane", 2, "the store")
    yield lane
    lane.end()
    lane.join(60)
    assert not [one for one in threading.enumerate() if one.name.startswith("lane-")]


class Held:
    """Work that runs until it is let go."""

    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.ended = False

    def __call__(self) -> str:
        self.entered.set()
        assert self.go.wait(60)
        self.ended = True
        return "done"

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 60)


async def test_errors_are_raised_where_they_are_waited_for(lane):
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await lane.run(fail)
    [error, value] = await lane.run_all([fail, lambda: 3])
    assert isinstance(error, KeyError)
    assert value == 3
    assert await lane.run_all([]) == []


async def test_a_call_of_several_works_ends_when_all_have(lane):
    held = Held()
    call = asyncio.create_task(lane.run_all([held, int]))
    await held.begun()
    assert not (await asyncio.wait({call}, timeout=0.1))[0]
    held.go.set()
    assert await call == ["done", 0]


async def test_who_waits_is_cancelled_only_once_the_work_has_ended(lane):
    held = Held()
    call = asyncio.create_task(lane.run(held))
    await held.begun()
    call.cancel()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not call.done()
    assert lane.running == 1
    held.go.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert held.ended


async def test_work_that_was_not_begun_is_forgotten_when_who_waits_is_cancelled(lane):
    first, second, third = Held(), Held(), Held()
    calls = [asyncio.create_task(lane.run(held)) for held in (first, second, third)]
    await first.begun()
    await second.begun()
    calls[2].cancel()
    with pytest.raises(asyncio.CancelledError):
        await calls[2]
    first.go.set()
    second.go.set()
    assert await asyncio.gather(*calls[:2]) == ["done", "done"]
    assert not third.entered.is_set()


async def test_what_is_cancelled_while_all_threads_are_stuck_is_forgotten(lane):
    class Buffer:
        pass

    held = [Held(), Held()]
    stuck = [asyncio.create_task(lane.run(one)) for one in held]
    for one in held:
        await one.begun()
    kept, buffers = [], []
    for number in range(2000):
        buffer = Buffer()
        buffers.append(weakref.ref(buffer))
        call = asyncio.create_task(lane.run(lambda buffer=buffer, number=number: number))
        await asyncio.sleep(0)
        if number % 500 == 0:
            kept.append(call)
        else:
            call.cancel()
        del buffer, call
    await asyncio.sleep(0.01)
    gc.collect()
    assert sum(one() is not None for one in buffers) <= 200
    for one in held:
        one.go.set()
    assert await asyncio.gather(*kept) == [0, 500, 1000, 1500]
    assert await asyncio.gather(*stuck) == ["done", "done"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_which_has_no_such_threads_is_refused(lane):
    told, tell = os.pipe()
    child = os.fork()
    if not child:
        try:
            lane.submit(int)
        except BackendUnavailable as error:
            os.write(tell, str(error).encode())
        os._exit(0)
    os.close(tell)
    os.waitpid(child, 0)
    assert b"the store: was opened by process" in os.read(told, 1000)
    os.close(told)
    assert lane.submit(int).result(60) == 0


async def test_running_work_is_aborted_once_when_who_waits_is_cancelled(lane):
    held, aborts = Held(), []

    def abort() -> None:
        aborts.append(1)
        held.go.set()

    call = asyncio.create_task(lane.run(held, abort))
    await held.begun()
    call.cancel()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert aborts == [1]
    assert held.ended


async def test_all_that_runs_can_be_aborted_at_once():
    lanes = Lanes("kind", big=1, small=1)
    running, waiting, unstoppable = Held(), Held(), Held()
    call = asyncio.create_task(lanes["big"].run(running, running.go.set))
    other = asyncio.create_task(lanes["small"].run(unstoppable))
    await running.begun()
    await unstoppable.begun()
    queued = asyncio.create_task(lanes["big"].run(waiting, waiting.go.set))
    await asyncio.sleep(0)
    lanes.abort()
    assert await call == "done"
    with pytest.raises(BackendUnavailable, match="closed before its turn came"):
        await queued
    assert not waiting.entered.is_set()
    assert not other.done()
    unstoppable.go.set()
    assert await other == "done"
    await lanes.close()


async def test_closing_waits_for_what_runs_and_forgets_the_rest(lane):
    running, other, waiting = Held(), Held(), Held()
    calls = [asyncio.create_task(lane.run(one)) for one in (running, other, waiting)]
    await running.begun()
    await other.begun()
    closing = asyncio.create_task(lane.close())
    with pytest.raises(BackendUnavailable, match="the store: closed before its turn came"):
        await calls[2]
    assert not closing.done()
    running.go.set()
    other.go.set()
    await closing
    assert await asyncio.gather(*calls[:2]) == ["done", "done"]
    assert not waiting.entered.is_set()
    with pytest.raises(BackendUnavailable, match="the store: is closed"):
        await lane.run(Held())
    with pytest.raises(BackendUnavailable, match="the store: is closed"):
        lane.submit(Held())
    await lane.close()


async def test_an_idle_thread_keeps_nothing_of_its_last_work_alive(lane):
    class Buffer:
        pass

    buffer = Buffer()
    gone = weakref.ref(buffer)
    await lane.run(lambda kept=buffer: kept)
    del buffer
    await lane.run_all([lambda: None, lambda: None])
    deadline = time.monotonic() + 60
    while gone() is not None:  # a thread that has told its result is not idle yet
        assert time.monotonic() < deadline
        gc.collect()
        await asyncio.sleep(0.001)


def test_a_lane_that_is_forgotten_leaves_no_thread():
    forgotten = Lane("forgotten", 2)
    ran, threads = forgotten.submit(int), forgotten._threads
    del forgotten
    for thread in threads:
        thread.join(60)
    assert ran.result() == 0
    assert not any(thread.is_alive() for thread in threads)


async def test_one_lane_does_not_wait_for_another():
    lanes = Lanes("kind", big=1, small=1)
    held = Held()
    call = asyncio.create_task(lanes["big"].run(held))
    await held.begun()
    assert lanes.running == 1
    assert (await lanes["small"].run(lambda: threading.current_thread().name)) == "kind-small-0"
    held.go.set()
    await call
    await lanes.close()


async def test_who_waits_until_all_have_settled_is_cancelled_only_then():
    one, other = asyncio.Future(), asyncio.Future()
    call = asyncio.create_task(settled([one, other]))
    for _ in range(2):
        await asyncio.sleep(0)
        call.cancel()
    one.set_exception(KeyError("x"))
    await asyncio.sleep(0.01)
    assert not call.done()
    assert not other.cancelled()
    other.set_result(3)
    with pytest.raises(asyncio.CancelledError):
        await call
    [error, value] = await settled([one, other])
    assert isinstance(error, KeyError)
    assert value == 3
    assert await settled([]) == []


@pytest.mark.parametrize("there_are", range(4))
def test_with_too_few_threads_none_is_kept(only_threads, there_are):
    told = r"can't start .*allow this process more"
    with only_threads(there_are), pytest.raises(BackendUnavailable, match=told):
        Lanes("scarce", first=2, second=2)


def test_a_stuck_thread_does_not_keep_the_process_from_ending():
    source = """
import threading
from kvconnect.backends.lanes import Lane
entered = threading.Event()
def stuck():
    entered.set()
    threading.Event().wait()
Lane("lane", 1).submit(stuck)
assert entered.wait(60)
"""
    subprocess.run([sys.executable, "-c", source], timeout=60, check=True)
