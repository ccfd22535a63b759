"""The ranks of one engine as processes of a `torch.distributed` job."""

from __future__ import annotations

import pickle
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self, TypeVar, cast

import torch.distributed as dist

from kvconnect.connector.ranks.link import MOST_NBYTES, Message, RankLink
from kvconnect.connector.ranks.sockets import connect_ranks
from kvconnect.connector.ranks.watch import END_S, RankWatch, VerdictKind, do_within, end_group
from kvconnect.errors import (
    ConfigurationError,
    ConnectorContractError,
    EngineClosed,
    RankDivergence,
    RankLost,
)

T = TypeVar("T")

_LEAVE_S = 1.0
"""The seconds that this rank waits when it leaves, so that others can receive the last exchange."""

_BROADCAST, _GATHER = 1, 2
_KINDS = {_BROADCAST: "broadcast", _GATHER: "allgather"}
_SOUND, _REFUSED = 0, 1


class DistributedCommunicator:
    """A `Communicator` over a TCP connection between each two ranks of a job.

    Works beside a default group of any backend, NCCL too. Values are exchanged in host memory. Each
    part of an exchange is one message to each rank, which no rank answers: so both exchanges of a
    step together take about one round trip. Heartbeats go over a gloo group of their own.

    It never hangs. Once a rank is lost, every call raises on every other rank, naming it:

    - its process ended: at once, by its closed connections;
    - it is stopped, or its machine is lost: after `silence_s` without a heartbeat, which a thread
      of each rank sends every quarter of a second, whatever the engine's thread does;
    - it lives, but its engine does not join the exchange: after `timeout_s`.

    Afterwards the communicator cannot be used: close it, and start the engine anew on all ranks.

    Values are pickled, because a connector's metadata is an object of the user's own. They come
    only from ranks of this job: both sides of a connection prove that they know a token of the job.
    They are trusted as torch.distributed's ``broadcast_object_list`` trusts them, whose connections
    carry the tokens. A process that can read or join those can run code in the job: keep its
    network private.

    Methods run on the engine's thread.

    Args:
        timeout_s: seconds that the others wait for a rank in an exchange; set it above the time of
            a step and above ``load_timeout_s``.
        connect_timeout_s: seconds that the others wait for a rank to connect; `timeout_s` by
            default.
        silence_s: seconds without a heartbeat after which a rank counts as lost; above 1.

    Attributes:
        rank: the number of this process; 0 is the leader.
        size: the number of ranks.

    Raises:
        ConfigurationError: torch.distributed is not initialized, or an argument is wrong.
        RankLost: a rank cannot be reached, or has ended.
        RuntimeError: torch.distributed's error if ranks do not connect within `connect_timeout_s`.
    """

    def __init__(
        self,
        *,
        timeout_s: float = 120.0,
        silence_s: float = 4.0,
        connect_timeout_s: float | None = None,
    ) -> None:
        for field, value, least in (("timeout_s", timeout_s, 0.0), ("silence_s", silence_s, 1.0)):
            if not value > least:
                raise ConfigurationError(f"{field}: {value!r} must be above {least:g}")
        if not (dist.is_available() and dist.is_initialized()):
            raise ConfigurationError(
                "DistributedCommunicator: torch.distributed is not initialized; call "
                "torch.distributed.init_process_group first, on every rank"
            )
        self._timeout_s = timeout_s
        connect_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        group = dist.new_group(
            timeout=timedelta(seconds=connect_s), backend="gloo", group_desc="kvconnect"
        )
        self._group: dist.ProcessGroup | None = group
        self.rank = int(group.rank())
        self.size = int(group.size())
        self._peers = [peer for peer in range(self.size) if peer != self.rank]
        self._number = 0
        self._closed = False
        try:
            connections = connect_ranks(group, connect_s)
        except RankLost:
            del group
            do_within(END_S, self._destroy_group)
            raise
        self._links = {peer: RankLink(connections[peer]) for peer in self._peers}
        self._watch = RankWatch(group, silence_s=silence_s)
        for link in self._links.values():
            self._watch.on_over(link.end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def broadcast(self, value: T, *, idle: bool = False) -> T:
        """Returns the leader's `value`, on every rank; values of other ranks are ignored.

        Blocks the others until the leader has called; the leader itself only while the connection
        to another rank is full of earlier exchanges.

        Args:
            value: the leader's; picklable.
            idle: true if the leader may take any time while it sends heartbeats: its engine has no
                requests.

        Raises:
            RankLost: a rank died, is stopped, has left or did not join the exchange; names the
                rank. Final.
            RankDivergence: a rank is in another exchange. Final, and raised on all.
            ConnectorContractError: the leader's value cannot be pickled (all ranks raise, and the
                ranks are in step), or not be unpickled (final, and raised on all).
            EngineClosed: the communicator is closed.
        """
        self._begin()
        if self.rank == 0:
            error = self._send(_BROADCAST, value)
            if error is not None:
                raise ConnectorContractError(f"rank 0: {error}") from error
            return value
        payload = self._receive(0, _BROADCAST, None if idle else self._timeout_s)
        return cast("T", self._loaded(0, payload))

    def allgather(self, value: T) -> list[T]:
        """Returns every rank's `value`, by rank. Blocks until all have called.

        Raises:
            RankLost, RankDivergence, ConnectorContractError, EngineClosed: as `broadcast`.
        """
        self._begin()
        mine = self._send(_GATHER, value)
        payloads = {peer: self._receive(peer, _GATHER, self._timeout_s) for peer in self._peers}
        if mine is not None:
            raise ConnectorContractError(f"rank {self.rank}: {mine}") from mine
        return [
            value if rank == self.rank else self._loaded(rank, payloads[rank])
            for rank in range(self.size)
        ]

    def fail(self, error: BaseException) -> None:
        """Ends the engine on all ranks: this rank leaves its step by `error`.

        The other ranks raise wherever they wait for this one, also in the groups of
        `end_with_ranks`. Not collective; blocks for some milliseconds. Does nothing if the engine
        has already ended.
        """
        if self._closed or self._watch.verdict is not None:
            return
        if isinstance(error, RankDivergence):
            self._watch.judge(VerdictKind.DIVERGED, self.rank, str(error))
        else:
            text = f"rank {self.rank}: {type(error).__name__}: {error}"
            self._watch.judge(VerdictKind.BROKEN, self.rank, text)

    def end_with_ranks(self, group: dist.ProcessGroup) -> None:
        """Registers `group`, whose waits end on every thread of this process when a rank is lost.

        For the groups of the model's own collectives. gloo has no other way to end a wait for a
        rank that is stopped; NCCL is aborted.
        """
        self._watch.on_over(lambda: end_group(group))

    def check(self, timeout_s: float = 0.0) -> None:
        """Raises if a rank is lost or failed; waits up to `timeout_s` for a verdict.

        Called when a collective of another group raised, to find out whether a lost rank was the
        cause.

        Raises:
            RankLost, RankDivergence, ConnectorContractError, EngineClosed: as `broadcast`.
        """
        if self._closed:
            raise EngineClosed("DistributedCommunicator: is closed")
        if (verdict := self._watch.wait(timeout_s)) is not None:
            raise verdict.error()

    def close(self) -> None:
        """Reports to the other ranks that this one leaves, and releases the group. Idempotent.

        Blocks for some milliseconds, a few seconds at most. Ranks may leave at different times. A
        rank that waits for one that left raises `RankLost`.
        """
        if self._closed:
            return
        self._closed = True
        until = time.monotonic() + _LEAVE_S
        if self._watch.verdict is None:
            for link in self._links.values():
                with suppress(ConnectionError, TimeoutError):
                    link.wait_until_sent(until - time.monotonic())
        self._watch.close()
        for link in self._links.values():
            link.close()
        self._links.clear()
        do_within(END_S, self._destroy_group)

    # ------------------------------------------------------------------ inside

    def _destroy_group(self) -> None:
        group, self._group = self._group, None
        with suppress(ValueError):  # the job has destroyed the default group, with all others
            dist.destroy_process_group(group)  # whose descriptors go, unless a thread is left in it

    def _begin(self) -> None:
        self.check()
        self._number += 1
        self._watch.exchanges = self._number

    def _send(self, kind: int, value: object) -> Exception | None:
        """Sends `value` to every other rank; returns the error if it cannot be pickled."""
        status, refused = _SOUND, None
        try:
            payload = pickled(value)
        except Exception as error:  # noqa: BLE001  whatever a user's object does
            status, refused = _REFUSED, error
            payload = f"{type(error).__name__}: {error}".encode()
        message = Message(kind, status, self._number, payload)
        for peer, link in self._links.items():
            try:
                link.wait_until_sent(self._timeout_s, but=1)
                link.send(message)
            except (ConnectionError, TimeoutError) as error:
                raise self._failed(peer, error, self._timeout_s) from error
        return refused

    def _receive(self, peer: int, kind: int, timeout_s: float | None) -> Message:
        """Returns the message of `peer` in this exchange."""
        try:
            message = self._links[peer].receive(timeout_s)
        except (ConnectionError, TimeoutError) as error:
            raise self._failed(peer, error, timeout_s) from error
        if (message.kind, message.number) != (kind, self._number):
            text = (
                f"rank {self.rank} is in exchange {self._number}, {_KINDS[kind]}; rank {peer} in "
                f"exchange {message.number}, {_KINDS.get(message.kind, 'unknown')}"
            )
            raise self._watch.judge(VerdictKind.DIVERGED, peer, text).error()
        return message

    def _loaded(self, rank: int, message: Message) -> Any:
        """Returns the value that `rank` sent.

        Raises:
            ConnectorContractError: `rank` could not pickle the value, or this rank cannot unpickle
                it.
        """
        if message.status == _REFUSED:
            raise ConnectorContractError(f"rank {rank}: {message.payload.decode(errors='replace')}")
        try:
            return unpickled(message.payload)
        except Exception as error:
            text = (
                f"rank {self.rank} cannot unpickle what rank {rank} sent: "
                f"{type(error).__name__}: {error}"
            )
            raise self._watch.judge(VerdictKind.BROKEN, self.rank, text).error() from error

    def _failed(
        self, peer: int, error: ConnectionError | TimeoutError, timeout_s: float | None
    ) -> Exception:
        """Returns the error to raise when a wait for `peer` ended with `error`."""
        if self._closed:
            return EngineClosed("DistributedCommunicator: was closed during an exchange")
        if isinstance(error, TimeoutError) and timeout_s is not None:
            return self._watch.judge_late(peer, timeout_s).error()
        return self._watch.wait_for_verdict(peer, str(error)).error()


def pickled(value: object) -> bytes:
    """Returns `value` pickled.

    Other threads run meanwhile: heartbeats continue however large `value` is.

    Raises:
        ValueError: the pickle exceeds `MOST_NBYTES`; pickling stops there.
        Exception: any error of pickling a user's object.
    """
    sink = _Sink()
    pickle.Pickler(sink, protocol=5).dump(value)
    return b"".join(sink.parts)


def unpickled(data: bytes | bytearray) -> Any:
    """Returns the value of which `data` was made, by a rank of this one's own job.

    Other threads run meanwhile, as for `pickled`.

    Raises:
        Exception: any error of unpickling a user's object.
    """
    return pickle.Unpickler(_Source(data)).load()  # noqa: S301  from this job's own ranks


class _Sink:
    """A file that collects and counts written bytes.

    Each write is a Python call, at which other threads can run. `pickle.dumps` holds the
    interpreter's lock until its end.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._nbytes = 0

    def write(self, part: Any) -> int:
        nbytes = len(part)
        self._nbytes += nbytes
        if self._nbytes > MOST_NBYTES:
            raise ValueError(f"it has over {MOST_NBYTES} bytes, which is all an exchange takes")
        self.parts.append(bytes(part))
        return nbytes


class _Source:
    """A file whose every read is a Python call, at which other threads can run."""

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = memoryview(data)
        self._at = 0

    def read(self, nbytes: int) -> bytes:
        self._at += nbytes
        return bytes(self._data[self._at - nbytes : self._at])

    def readinto(self, into: Any) -> int:
        part = self._data[self._at : self._at + len(into)]
        into[: len(part)] = part
        self._at += len(part)
        return len(part)

    def readline(self) -> bytes:
        rest = bytes(self._data[self._at :])
        line = rest[: rest.find(b"\n") + 1] or rest
        self._at += len(line)
        return line
