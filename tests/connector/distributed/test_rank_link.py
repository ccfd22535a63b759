"""A link between two ranks keeps the order of messages, and each of its waits ends."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvconnect.connector.ranks.link import Message, RankLink

LARGE = 30_000_000  # no connection takes so much at once


@pytest.fixture
def ends():
    made = socket.socketpair()
    yield made
    for one in made:
        one.close()


@pytest.fixture
def links(ends):
    made = [RankLink(one) for one in ends]
    yield made
    for link in made:
        link.close()


def test_messages_of_any_size_arrive_in_order_though_both_send_first(links) -> None:
    sizes = [0, LARGE, 1, 70_000, 0, 65_512, 65_513, LARGE]
    payloads = [bytes([number]) * size for number, size in enumerate(sizes)]
    for link in links:
        for number, payload in enumerate(payloads):
            link.send(Message(1, 0, number, payload))
    for link in links:
        for number, payload in enumerate(payloads):
            assert link.receive(20) == Message(1, 0, number, payload)
    for link in links:
        link.wait_until_sent(20)


def test_a_wait_for_a_message_ends_with_its_timeout_and_with_the_link(links) -> None:
    link = links[0]
    with pytest.raises(TimeoutError):
        link.receive(0.05)
    with ThreadPoolExecutor(1) as waiting:
        answer = waiting.submit(link.receive, None)
        link.end()
        with pytest.raises(ConnectionError, match="was ended"):
            answer.result(60)
    with pytest.raises(ConnectionError, match="was ended"):
        link.receive(None)


def test_a_wait_until_messages_are_taken_ends_too(links) -> None:
    link = links[0]
    for number in range(2):
        link.send(Message(1, 0, number, bytes(LARGE)))
    with pytest.raises(TimeoutError):
        link.wait_until_sent(0.05, but=1)
    with ThreadPoolExecutor(1) as waiting:
        answer = waiting.submit(link.wait_until_sent, 60.0)
        link.end()
        with pytest.raises(ConnectionError, match="was ended"):
            answer.result(60)
    with pytest.raises(ConnectionError, match="was ended"):
        link.send(Message(1, 0, 2, b""))


@pytest.mark.parametrize("beginning", [0, 10, 1000])
def test_a_connection_that_ends_amid_a_message_is_an_error(links, ends, beginning) -> None:
    message = Message(1, 0, 1, bytes(100_000))
    ends[1].sendall((message.head() + message.payload)[:beginning])
    with pytest.raises(TimeoutError):
        links[0].receive(0.05)
    links[0].send(Message(1, 0, 1, bytes(LARGE)))
    links[1].close()
    for wait in (links[0].receive, links[0].wait_until_sent):
        with pytest.raises(ConnectionError):
            wait(20)


def test_after_a_wait_that_ended_amid_a_message_the_rest_is_no_message(links, ends) -> None:
    message = Message(1, 0, 1, bytes(100_000))
    ends[1].sendall((message.head() + message.payload)[:1000])
    with pytest.raises(TimeoutError):
        links[0].receive(0.05)
    with pytest.raises(ConnectionError, match="not received whole"):
        links[0].receive(20)


def test_what_no_rank_sent_is_of_no_kind(links, ends) -> None:
    ends[1].sendall(bytes([9, 0, 0, 0, 1]) + bytes(95))
    assert links[0].receive(20).kind == 0
