"""The TCP connections over which an engine's ranks exchange messages."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import sys
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kvconnect.errors import RankLost

_LOOPBACK = "127.0.0.1"
_NOTE_NBYTES = 2048
_MOST_HOSTS = 16
_TOKEN_NBYTES = 32
_HELLO = struct.Struct(f"<{_TOKEN_NBYTES}sq")  # the token of the rank that is called, the caller
_STRANGER_S = 10.0
"""The seconds that a new connection has to identify its rank."""


@dataclass(frozen=True, slots=True)
class _Address:
    """The address of a rank.

    Attributes:
        hosts: addresses of its machine, the likeliest first.
        port: the port of its listener.
        token: the secret that a caller must prove to know, in hexadecimal digits.
    """

    hosts: list[str]
    port: int
    token: str


def connect_ranks(group: dist.ProcessGroup, timeout_s: float) -> dict[int, socket.socket]:
    """Returns a connection to each other rank of `group`, by its number there; collective.

    Ranks of one machine connect over the loopback. Both sides of a connection prove that they know
    a token of 32 random bytes, which the ranks exchange over `group`.

    Raises:
        RankLost: a rank could not be reached, or did not connect, within `timeout_s` seconds.
        RuntimeError: of torch.distributed: a rank did not come within `timeout_s`.
    """
    if group.size() == 1:
        return {}
    rank, until = group.rank(), time.monotonic() + timeout_s
    machines = _gathered(group, _machine(), until)
    is_one_machine = len(set(machines)) == 1
    token = secrets.token_bytes(_TOKEN_NBYTES)
    with ExitStack() as failed:
        listener = socket.create_server(
            (_LOOPBACK if is_one_machine else "", 0), backlog=group.size()
        )
        with listener:
            hosts = [_LOOPBACK] if is_one_machine else _hosts()[:_MOST_HOSTS]
            own = _Address(hosts, listener.getsockname()[1], token.hex())
            notes = _gathered(group, json.dumps(asdict(own)), until)
            addresses = [_Address(**json.loads(note)) for note in notes]
            made: dict[int, socket.socket] = {}
            for peer in range(rank):
                made[peer] = failed.enter_context(
                    _called(rank, peer, addresses[peer], token, until)
                )
            while len(made) < group.size() - 1:
                missing = min({*range(rank + 1, group.size())} - {*made})
                connection = _accepted(listener, missing, until)
                caller = _heard(connection, token, until)
                if caller is None or not rank < caller < group.size() or caller in made:
                    connection.close()
                    continue
                made[caller] = failed.enter_context(connection)
                with suppress(OSError):  # a rank that ended: the first exchange raises
                    connection.sendall(bytes.fromhex(addresses[caller].token))
        failed.pop_all()
    for connection in made.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _gathered(group: dist.ProcessGroup, text: str, until: float) -> list[str]:
    """Returns the `text` of every rank; collective."""
    data = text.encode().ljust(_NOTE_NBYTES)
    note = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    notes = [torch.zeros(len(data), dtype=torch.uint8) for _ in range(group.size())]
    group.allgather([notes], [note]).wait(timedelta(seconds=_left(until)))
    return [one.numpy().tobytes().decode().rstrip() for one in notes]


def _machine() -> str:
    """Returns a name that is equal in two processes only if they share a loopback interface."""
    if sys.platform == "linux":
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"
    return f"{socket.gethostname()} {uuid.getnode()}"


def _hosts() -> list[str]:
    """Returns IPv4 addresses of this machine, the likeliest to be reachable first."""
    found: list[str] = []
    if "MASTER_ADDR" in os.environ:  # the address of this machine on the route to the first rank
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ["MASTER_ADDR"], 9))
            found.append(probe.getsockname()[0])
    with suppress(OSError):
        found += socket.gethostbyname_ex(socket.gethostname())[2]
    return [host for host in dict.fromkeys(found) if not host.startswith("127.")]


def _called(rank: int, peer: int, address: _Address, token: bytes, until: float) -> socket.socket:
    """Returns a connection to `peer`, after `peer` has proved its identity."""
    reason = "it has no address that others can reach"
    for number, host in enumerate(address.hosts):
        limit_s = _left(until) / (len(address.hosts) - number)
        try:
            connection = socket.create_connection((host, address.port), limit_s)
        except OSError as error:
            reason = f"{host}:{address.port}: {error}"
            continue
        try:
            connection.sendall(_HELLO.pack(bytes.fromhex(address.token), rank))
            if hmac.compare_digest(_read(connection, _TOKEN_NBYTES, until), token):
                return connection
            reason = f"{host}:{address.port} is another process"
        except OSError as error:
            reason = f"{host}:{address.port}: {error}"
        connection.close()
    raise RankLost(peer, f"rank {peer} is lost: rank {rank} cannot connect to it: {reason}")


def _accepted(listener: socket.socket, missing: int, until: float) -> socket.socket:
    try:
        listener.settimeout(_left(until))
        return listener.accept()[0]
    except OSError as error:
        raise RankLost(missing, f"rank {missing} is lost: it did not connect: {error}") from error


def _heard(connection: socket.socket, token: bytes, until: float) -> int | None:
    """Returns the rank at the other end of `connection`; ``None`` if it does not know `token`."""
    try:
        hello = _read(connection, _HELLO.size, min(until, time.monotonic() + _STRANGER_S))
    except OSError:
        return None
    known, caller = _HELLO.unpack(hello)
    return int(caller) if hmac.compare_digest(known, token) else None


def _read(connection: socket.socket, nbytes: int, until: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        connection.settimeout(_left(until))
        part = connection.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("the other side closed the connection")
        data += part
    return data


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())
