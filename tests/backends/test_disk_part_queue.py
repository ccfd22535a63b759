"""Parts of large loads and saves: on the threads of their calls, and none waits for another."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from kvconnect.backends.disk.files.segments import PartQueue
from kvconnect.backends.lanes import Lane


@pytest.fixture
def lane():
    lane = Lane("kvconnect-disk-parts", 4)
    yield lane
    lane.end()


def test_more_calls_than_there_are_threads_end_all_with_their_parts(lane):
    queue, done = PartQueue(lane), []
    parts = [[partial(done.append, (call, part)) for part in range(5)] for call in range(9)]
    for running in [lane.submit(partial(queue.run, some)) for some in parts]:
        running.result(60)
    assert sorted(done) == [(call, part) for call in range(9) for part in range(5)]


def test_parts_of_one_call_run_side_by_side_on_three_threads(lane):
    meet = threading.Barrier(3)
    lane.submit(lambda: PartQueue(lane).run([partial(meet.wait, 60)] * 3)).result(60)


def test_no_more_than_three_parts_of_all_calls_run_at_a_time(lane):
    queue, meet, lock = PartQueue(lane), threading.Barrier(3), threading.Lock()
    running, most = 0, 0

    def part():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        meet.wait(60)
        with lock:
            running -= 1

    for call in [lane.submit(lambda: queue.run([part] * 12)) for _ in range(2)]:
        call.result(60)
    assert most == 3


def test_parts_of_large_calls_leave_a_thread_to_others(lane):
    inside, go_on = threading.Semaphore(0), threading.Event()

    def stay():
        inside.release()
        assert go_on.wait(60)

    large = lane.submit(lambda: PartQueue(lane).run([stay] * 8))
    for _ in range(3):
        assert inside.acquire(timeout=60)
    time.sleep(0.05)
    try:
        assert lane.submit(lambda: "small").result(60) == "small"
    finally:
        go_on.set()
    large.result(60)


def test_call_ends_by_itself_once_its_lane_takes_no_more_work(lane):
    done = []

    def call():
        lane.end()
        PartQueue(lane).run([partial(done.append, part) for part in range(4)])

    lane.submit(call).result(60)
    assert done == [0, 1, 2, 3]
