"""Ranks connect to each other, and to no other process."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import pytest
from torch import Tensor

from kvconnect.connector.ranks import sockets as rank_sockets
from kvconnect.connector.ranks.sockets import connect_ranks
from kvconnect.errors import RankLost


class Threads:
    """A group of ranks that are threads. `meddle` gets what they gather, before they do."""

    def __init__(self, size: int, meddle: Callable[[list[Tensor]], None] = lambda _: None) -> None:
        self._notes: list[Tensor] = [None] * size
        self._all_came = threading.Barrier(size, lambda: meddle(self._notes))
        self.here = threading.local()

    def rank(self) -> int:
        return self.here.rank

    def size(self) -> int:
        return len(self._notes)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor]) -> Threads:
        self._notes[self.rank()] = inputs[0]
        self._all_came.wait(60)
        for output, note in zip(outputs[0], self._notes, strict=True):
            output.copy_(note)
        self._all_came.wait(60)
        return self

    def wait(self, timeout: timedelta) -> None:
        """All came."""


def connected(group: Threads, timeout_s: float = 20.0) -> list[dict[int, socket.socket] | RankLost]:
    """What each rank gets."""

    def connect(rank: int) -> dict[int, socket.socket] | RankLost:
        group.here.rank = rank
        try:
            return connect_ranks(group, timeout_s)
        except RankLost as error:
            return error

    with ThreadPoolExecutor(group.size()) as ranks:
        return list(ranks.map(connect, range(group.size())))


def check_pairs(ranks: list[dict[int, socket.socket]]) -> None:
    with ExitStack() as stack:
        for made in ranks:
            for connection in made.values():
                stack.enter_context(connection)
        for rank, made in enumerate(ranks):
            assert sorted({rank, *made}) == list(range(len(ranks)))
            for peer, connection in made.items():
                connection.sendall(bytes([rank]))
                assert ranks[peer][rank].recv(2) == bytes([rank])


def address(note: Tensor) -> tuple[str, int] | None:
    """Where a rank listens, if that is what it says."""
    text = note.numpy().tobytes().decode().rstrip()
    if not text.startswith("{"):
        return None
    said = json.loads(text)
    return said["hosts"][-1], said["port"]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_each_two_ranks_of_a_machine_have_a_connection_over_the_loopback(size: int) -> None:
    heard = []
    check_pairs(connected(Threads(size, lambda notes: heard.extend(map(address, notes)))))
    assert {where[0] for where in heard if where} <= {"127.0.0.1"}


def test_ranks_of_several_machines_try_each_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sockets, "_machine", lambda: uuid.uuid4().hex)
    monkeypatch.setattr(rank_sockets, "_hosts", lambda: ["::1", "127.0.0.1"])
    check_pairs(connected(Threads(3)))


def test_a_rank_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_sockets, "_machine", lambda: uuid.uuid4().hex)
    monkeypatch.setattr(rank_sockets, "_hosts", list)
    first, second = connected(Threads(2), 0.5)
    assert str(second).startswith("rank 0 is lost: rank 1 cannot connect to it: it has no address")
    assert str(first).startswith("rank 1 is lost: it did not connect")


@pytest.mark.parametrize(
    "hello",
    [b"", bytes(32) + (2).to_bytes(8, "little"), b"GET / HTTP/1.1\r\n\r\n".ljust(64)],
    ids=["none", "guess", "http"],
)
def test_strangers_get_nothing_and_keep_no_rank_out(hello: bytes) -> None:
    with ExitStack() as stack:
        strangers = []

        def intrude(notes: list[Tensor]) -> None:
            for where in map(address, notes):
                if where is not None and len(strangers) < 3:
                    one = stack.enter_context(socket.create_connection(where, 20))
                    one.sendall(hello)
                    one.shutdown(socket.SHUT_WR)
                    strangers.append(one)

        check_pairs(connected(Threads(3, intrude)))
        assert len(strangers) == 3
        for one in strangers:
            try:
                assert one.recv(1) == b""
            except ConnectionResetError:
                continue


def test_another_process_in_the_place_of_a_rank_is_not_taken_for_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:

        def pose() -> None:
            caller = stack.enter_context(listener.accept()[0])
            caller.recv(64)
            caller.sendall(bytes(32))

        def meddle(notes: list[Tensor]) -> None:
            if address(notes[0]) is not None:
                text = notes[0].numpy().tobytes().decode().rstrip()
                said = json.loads(text) | {"port": listener.getsockname()[1]}
                notes[0].numpy()[:] = list(json.dumps(said).encode().ljust(len(notes[0])))

        poser = threading.Thread(target=pose)
        poser.start()
        _, second = connected(Threads(2, meddle), 2.0)
        poser.join(60)
        assert str(second).endswith("is another process")
