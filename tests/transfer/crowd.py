"""Hostile peers in a process of their own: many connections that are of use to no one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Self

from commanded import Commanded

from kvconnect.errors import BadMessage, PeerRefused, PeerUnreachable
from kvconnect.transfer.control import handshake
from kvconnect.transfer.control.endpoint import Endpoint
from kvconnect.transfer.control.handshake import OPENING_LIMIT, shake_hands
from kvconnect.transfer.control.messages import Hello, Ping, encode
from kvconnect.transfer.control.wire import Wire, frame
from kvconnect.transfer.local import decode
from kvconnect.transfer.tcp.handshake import greet
from kvconnect.transfer.tcp.peer import TcpLocal

_WORKERS = 4
_PING_S = 0.5


class _Silent:
    """A connection that never says a whole word."""

    def __init__(self, port: int, _number: int, _hello: Hello) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 5)

    def stay(self) -> None:
        """Keeps it open."""

    def is_open(self) -> bool:
        self.socket.setblocking(False)
        try:
            while self.socket.recv(1 << 16):
                pass
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        self.socket.close()


class _Stalled(_Silent):
    """One that opens as if it knew the secret, and goes no further."""

    def __init__(self, port: int, number: int, hello: Hello) -> None:
        super().__init__(port, number, hello)
        magic, version = handshake._MAGIC, handshake.PROTOCOL
        self.socket.sendall(frame(handshake._OPENING.pack(magic, version, 1, bytes(32))))


class _Channel(_Silent):
    """One that opens as every reader does, each as another one, and asks for nothing."""

    def __init__(self, port: int, number: int, hello: Hello) -> None:
        super().__init__(port, number, hello)
        mine = hello.model_copy(update={"engine_id": f"crowd/{number}"})
        self._wire = Wire(self.socket, limit=OPENING_LIMIT, silence_s=5)
        shake_hands(self._wire, Endpoint(lambda: mine, lambda *_: None), initiator=True)
        self._pings = count()
        self._ping_at = time.monotonic() + _PING_S

    def stay(self) -> None:
        if time.monotonic() > self._ping_at:
            self._ping_at = time.monotonic() + _PING_S
            ping = encode(Ping(number=next(self._pings)))
            self._wire.write(self._wire.frame(ping), time.monotonic() + 1)


class _Data(_Silent):
    """One that is let in where blocks are read, over TCP, and reads none."""

    def __init__(self, port: int, number: int, hello: Hello) -> None:
        local = decode(TcpLocal, hello.local)
        super().__init__(local.port, number, hello)
        greet(self.socket, None, bytes.fromhex(local.incarnation), time.monotonic() + 5)


_KINDS: dict[str, type[_Silent]] = {
    "silent": _Silent,
    "stalled": _Stalled,
    "channels": _Channel,
    "data": _Data,
}


def _work(numbers: range, open_one: Callable[[int], _Silent], opened: list[int], again: bool):
    mine: dict[int, _Silent] = {}
    while True:
        before = opened[numbers.start]
        for number in numbers:
            with suppress(OSError, PeerRefused, PeerUnreachable, BadMessage):
                if number in mine and (again or not mine[number].is_open()):
                    mine.pop(number).close()
                if number not in mine:
                    mine[number] = open_one(number)
                    opened[numbers.start] += 1
                mine[number].stay()
        if opened[numbers.start] == before:
            time.sleep(0.02)


class _Crowd:
    """What runs in the process."""

    def __init__(self, kind: str, again: bool, size: int, port: int, hello: Hello) -> None:
        # Another name each time: else the later one takes the earlier one's place, and no other's.
        ids, self._opened = count(), [0] * _WORKERS

        def open_one(_number: int) -> _Silent:
            return _KINDS[kind](port, next(ids), hello)

        for worker in range(_WORKERS):
            work = (range(worker, size, _WORKERS), open_one, self._opened, again)
            threading.Thread(target=_work, args=work, daemon=True).start()

    def opened(self) -> int:
        return sum(self._opened)


class Crowd(Commanded):
    """Starts `size` hostile peers; those that are cut off come back at once.

    Args:
        kind: ``silent`` and ``stalled`` never finish their opening; ``channels`` and ``data`` are
            let in, as every process of a machine without a secret.
        port: of the control channel.
        hello: as an honest peer says it; of ``data`` as the attacked one does.
        again: they come anew all the time, also if they are not cut off.
    """

    def __init__(self, kind: str, port: int, hello: Hello, size: int, *, again: bool) -> None:
        super().__init__(_Crowd, kind, again, size, port, hello)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def opened(self) -> int:
        """How often one of them got as far as it wants to."""
        return self.ask("opened")
