"""A transfer keeps what it copies alive until it is done, and not longer."""

from __future__ import annotations

import gc
import weakref

import pytest

from kvconnect.kernels.blocks.transfer import Transfer


class Event:
    """Happens when a test says so."""

    def __init__(self):
        self.happened = False
        self.waited = []

    def query(self):
        return self.happened

    def synchronize(self):
        self.happened = True

    def wait(self, stream):
        self.waited.append(stream)


class Memory:
    """What a copy uses."""


@pytest.fixture
def flight():
    event, memory = Event(), Memory()
    alive = weakref.ref(memory)
    return Transfer(event, (memory,)), event, alive


def test_without_an_event_it_is_done():
    memory = Memory()
    alive = weakref.ref(memory)
    transfer = Transfer(keep=(memory,))
    del memory
    assert transfer.done()
    transfer.wait()
    transfer.wait_on("stream")
    assert alive() is None


def test_done_follows_the_event_and_lets_go(flight):
    transfer, event, alive = flight
    assert not transfer.done()
    assert alive() is not None
    event.happened = True
    assert transfer.done()
    assert transfer.done()
    assert alive() is None


def test_wait_blocks_until_the_event(flight):
    transfer, event, alive = flight
    transfer.wait()
    assert event.happened
    assert transfer.done()
    assert alive() is None
    transfer.wait()


def test_wait_on_orders_a_stream_behind_it(flight):
    transfer, event, _ = flight
    transfer.wait_on("stream")
    assert event.waited == ["stream"]
    event.happened = True
    assert transfer.done()
    transfer.wait_on("other")
    assert event.waited == ["stream"]


def test_one_that_nobody_keeps_still_keeps_its_memory(flight):
    transfer, _, alive = flight
    del transfer, flight
    gc.collect()
    assert alive() is not None


def test_the_next_transfer_lets_go_of_those_that_are_done():
    first = Event()
    memory = Memory()
    alive = weakref.ref(memory)
    Transfer(first, (memory,))
    del memory
    Transfer(Event(), ())
    assert alive() is not None
    first.happened = True
    last = Event()
    Transfer(last, ())
    assert alive() is None
    assert len(Transfer._in_flight) >= 1
    for one in list(Transfer._in_flight):
        one.wait()
