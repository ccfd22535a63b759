"""The bell of the engine's thread: no ring is lost, none is heard twice."""

from __future__ import annotations

import threading

import pytest

from kvconnect.engine.thread import Inbox
from kvconnect.errors import EngineClosed


def test_a_ring_before_the_wait_is_heard_once():
    inbox = Inbox[str]()
    inbox.ring()
    inbox.ring()
    assert inbox.wait(0)
    assert not inbox.wait(0)


def test_messages_come_in_order_and_ring():
    inbox = Inbox[str]()
    inbox.post("a")
    inbox.post("b")
    assert inbox.wait(0)
    assert list(inbox.take()) == ["a", "b"]
    assert list(inbox.take()) == []


def test_what_is_not_asked_for_stays():
    inbox = Inbox[str]()
    for message in "abc":
        inbox.post(message)
    assert next(inbox.take()) == "a"
    assert inbox.close(None) == ["b", "c"]


def test_a_ring_wakes_a_sleeper():
    inbox = Inbox[str]()
    heard = []
    sleeper = threading.Thread(target=lambda: heard.append(inbox.wait(60)))
    sleeper.start()
    inbox.ring()
    sleeper.join(timeout=60)
    assert heard == [True]


def test_closing_returns_what_nobody_will_read_and_refuses_more():
    inbox = Inbox[str]()
    inbox.post("late")
    cause = RuntimeError("broken")
    assert inbox.close(cause) == ["late"]
    with pytest.raises(EngineClosed) as caught:
        inbox.post("later")
    assert caught.value.__cause__ is cause
    inbox.ring()  # a store may still ring
