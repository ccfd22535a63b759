"""The ranks of one engine as processes of a `torch.distributed` job."""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from kvconnect.connector.rank_watch import FOREVER, RankWatch, VerdictKind, end_group
from kvconnect.errors import (
    ConfigurationError,
    ConnectorContractError,
    EngineClosed,
    RankDivergence,
)

__all__ = ["DistributedCommunicator"]

T = TypeVar("T")

_LEAVE_FOR = timedelta(seconds=1)
_TAG = 0
_REST_TAG = 2
_MAGIC = 0x6B76_6363
_HEAD = struct.Struct("<IBBHqq")  # magic, kind, status, -, number of the exchange, bytes
_FRAME_NBYTES = 4096  # sent whole: what fits takes one message
_INLINE_NBYTES = _FRAME_NBYTES - _HEAD.size
_MOST_NBYTES = 1 << 30
_POSTED = 2  # the leader goes from its broadcast to the next exchange at once

_BROADCAST, _GATHER = 1, 2
_KINDS = {_BROADCAST: "broadcast", _GATHER: "allgather"}
_SOUND, _REFUSED = 0, 1


class DistributedCommunicator:
    """A `Communicator` over point-to-point messages of a gloo group of its own.

    Works beside a default group of any backend, NCCL too. Values are exchanged in host memory. A
    value of up to 4 KiB takes one message to each rank, for which all have a receive posted
    beforehand: so both exchanges of a step together take about one round trip.

    It never hangs. Once a rank is lost, every call raises on every other rank, naming it:

    - its process ended: at once, by its closed connections;
    - it is stopped, or its machine is gone: after `silence_s` without a heartbeat, which a thread
      of each rank sends every quarter of a second, whatever the engine's thread does;
    - it lives, but its engine does not come to the exchange: after `timeout_s`.

    Afterwards the communicator is of no use: close it, and make the engine again on all ranks.

    Values are pickled: the metadata of a connector is an object of the user's own, which the
    contract asks to be picklable. They come from the ranks of this one job only, through the
    connections of torch.distributed, and are trusted as its own ``broadcast_object_list`` trusts
    them. Whoever can connect to those can run code in the job: keep its network private.

    Methods run on the engine's thread, and block without serving Python's signal handlers.

    Args:
        ranks: numbers in the default group of this engine's ranks, ascending; all by default. Here
            they are numbered by their place in this list, and the first is the leader. Collective
            over the whole default group, as ``torch.distributed.new_group`` is: a rank that is not
            in `ranks` calls `take_part` instead.
        timeout_s: so long a rank may let the others wait in an exchange; longer than a step takes,
            and than ``load_timeout_s``.
        connect_timeout_s: so long a rank may let the others wait here; `timeout_s` by default.
        silence_s: so long a rank may send no heartbeat, above 1.

    Raises:
        ConfigurationError: torch.distributed is not initialized, or an argument is wrong.
        RuntimeError: of torch.distributed: the ranks did not come within `connect_timeout_s`.
    """

    def __init__(
        self,
        ranks: Sequence[int] | None = None,
        *,
        timeout_s: float = 120.0,
        silence_s: float = 4.0,
        connect_timeout_s: float | None = None,
    ) -> None:
        for field, value, least in (("timeout_s", timeout_s, 0.0), ("silence_s", silence_s, 1.0)):
            if not value > least:
                raise ConfigurationError(f"{field}: {value!r} must be above {least:g}")
        members = _members(ranks)
        if dist.get_rank() not in members:
            raise ConfigurationError(
                f"ranks: {members} are without this rank, {dist.get_rank()}; it calls take_part"
            )
        self._timeout_s = timeout_s
        connect_s = timeout_s if connect_timeout_s is None else connect_timeout_s
        self._group = dist.new_group(
            members, timeout=timedelta(seconds=connect_s), backend="gloo", group_desc="kvconnect"
        )
        self._rank = int(self._group.rank())
        self._size = int(self._group.size())
        self._peers = [peer for peer in range(self._size) if peer != self._rank]
        self._number = 0
        self._closed = False
        self._outgoing = torch.zeros(_FRAME_NBYTES, dtype=torch.uint8)
        self._frame = self._outgoing.numpy()
        self._sending: list[tuple[int, dist.Work, Tensor]] = []
        self._posted: dict[int, deque[tuple[dist.Work, Tensor]]] = {}
        for peer in self._peers:
            self._posted[peer] = deque()
            for _ in range(_POSTED):
                self._post(peer, torch.zeros(_FRAME_NBYTES, dtype=torch.uint8))
        self._watch = RankWatch(self._group, silence_s=silence_s)

    @staticmethod
    def take_part(ranks: Sequence[int], *, timeout_s: float = 120.0) -> None:
        """What a rank of the default group calls that is not in `ranks`, in place of making one."""
        dist.new_group(_members(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rank(self) -> int:
        """This process; 0 is the leader."""
        return self._rank

    @property
    def size(self) -> int:
        """How many there are."""
        return self._size

    def broadcast(self, value: T, *, idle: bool = False) -> T:
        """The leader's `value`, on every rank; what others pass is ignored.

        Blocks the others until the leader has called; the leader itself only until the exchange
        before was taken by all.

        Args:
            value: the leader's; picklable.
            idle: the leader may take any time, as long as it lives: an engine without requests.

        Raises:
            RankLost: a rank died, is stopped, left or did not come; names it. Final.
            RankDivergence: a rank is in another exchange. Final, and raised on all.
            ConnectorContractError: the leader's value cannot be pickled (all ranks raise, and the
                ranks are in step), or not be unpickled (final, and raised on all).
            EngineClosed: the communicator is closed.
        """
        self._begin()
        if self._rank == 0:
            error = self._send(_BROADCAST, value)
            if error is not None:
                raise ConnectorContractError(f"rank 0: {error}") from error
            return value
        payload = self._receive(0, _BROADCAST, None if idle else self._timeout_s)
        return cast("T", self._loaded(0, payload))

    def allgather(self, value: T) -> list[T]:
        """Every rank's `value`, by rank. Blocks until all have called.

        Raises:
            RankLost, RankDivergence, ConnectorContractError, EngineClosed: as `broadcast`.
        """
        self._begin()
        mine = self._send(_GATHER, value)
        payloads = {peer: self._receive(peer, _GATHER, self._timeout_s) for peer in self._peers}
        if mine is not None:
            raise ConnectorContractError(f"rank {self._rank}: {mine}") from mine
        return [
            value if rank == self._rank else self._loaded(rank, payloads[rank])
            for rank in range(self._size)
        ]

    def fail(self, error: Exception) -> None:
        """This rank leaves its step by `error`: the others raise wherever they wait for it.

        So they do in the groups of `end_with_ranks`, and the engine is over on all ranks. Not
        collective; blocks for some milliseconds. Nothing if it was over before.
        """
        if self._closed or self._watch.verdict is not None:
            return
        if isinstance(error, RankDivergence):
            self._watch.judge(VerdictKind.DIVERGED, self._rank, str(error))
        else:
            text = f"rank {self._rank}: {type(error).__name__}: {error}"
            self._watch.judge(VerdictKind.BROKEN, self._rank, text)

    def end_with_ranks(self, group: dist.ProcessGroup) -> None:
        """When a rank is lost, end what waits in `group`, too, on any thread of this process.

        For the groups of the model's own collectives: gloo has no other way out of a wait for a
        rank that is stopped, NCCL is aborted.
        """
        self._watch.on_over(lambda: end_group(group))

    def check(self, timeout_s: float = 0.0) -> None:
        """Raise if the ranks cannot go on together; blocks up to `timeout_s` to hear that.

        For what another group's collective raised: was it for a rank that is lost?

        Raises:
            RankLost, RankDivergence, ConnectorContractError, EngineClosed: as `broadcast`.
        """
        if self._closed:
            raise EngineClosed("DistributedCommunicator: is closed")
        if (verdict := self._watch.wait(timeout_s)) is not None:
            raise verdict.error()

    def close(self) -> None:
        """Tell the others that this rank leaves, and let go of the group. Idempotent.

        Blocks for some milliseconds, a few seconds at most. It is no exchange: ranks may leave at
        different times, and one that waits for a rank that left raises `RankLost`.
        """
        if self._closed:
            return
        self._closed = True
        if self._watch.verdict is None:
            for _, work, _ in self._sending:  # the others may still be to take the last exchange
                with suppress(RuntimeError):
                    work.wait(_LEAVE_FOR)
        self._watch.close()
        self._posted.clear()
        self._sending.clear()

    # ------------------------------------------------------------------ inside

    def _begin(self) -> None:
        self.check()
        self._number += 1
        self._watch.exchanges = self._number

    def _post(self, peer: int, buffer: Tensor) -> None:
        self._posted[peer].append((self._group.recv([buffer], peer, _TAG), buffer))

    def _send(self, kind: int, value: object) -> Exception | None:
        """To every other rank; `value`, or why it cannot be pickled, which is returned."""
        status, refused = _SOUND, None
        try:
            payload = pickle.dumps(value, protocol=5)
            if len(payload) > _MOST_NBYTES:
                raise ValueError(f"{len(payload)} bytes; an exchange takes up to {_MOST_NBYTES}")  # noqa: TRY301
        except Exception as error:  # noqa: BLE001  whatever a user's object does
            status, refused = _REFUSED, error
            payload = f"{type(error).__name__}: {error}".encode()
        for peer, work, _ in self._sending:  # the buffer is in use until then
            self._wait(work, peer, self._timeout_s)
        self._sending.clear()
        head = _HEAD.pack(_MAGIC, kind, status, 0, self._number, len(payload))
        inline = payload[:_INLINE_NBYTES]
        first = np.frombuffer(head + inline, np.uint8)
        self._frame[: len(first)] = first
        buffers = [(self._outgoing, _TAG)]
        if len(payload) > _INLINE_NBYTES:
            rest = torch.frombuffer(bytearray(payload[_INLINE_NBYTES:]), dtype=torch.uint8)
            buffers.append((rest, _REST_TAG))
        for peer in self._peers:
            for buffer, tag in buffers:
                try:
                    work = self._group.send([buffer], peer, tag)
                except RuntimeError as error:
                    raise self._failed(peer, error) from error
                self._sending.append((peer, work, buffer))
        return refused

    def _receive(self, peer: int, kind: int, timeout_s: float | None) -> bytes:
        """The payload of `peer`; the next receive is posted then."""
        work, buffer = self._posted[peer].popleft()
        self._wait(work, peer, timeout_s)
        data = buffer.numpy().tobytes()
        self._post_next(peer, buffer)
        magic, its_kind, status, _, number, length = _HEAD.unpack_from(data)
        if (magic, its_kind, number) != (_MAGIC, kind, self._number):
            raise self._diverged(peer, its_kind, number, kind)
        if not 0 <= length <= _MOST_NBYTES:
            raise self._diverged(peer, its_kind, number, kind)
        payload = data[_HEAD.size : _HEAD.size + min(length, _INLINE_NBYTES)]
        if length > _INLINE_NBYTES:
            rest = torch.empty(length - _INLINE_NBYTES, dtype=torch.uint8)
            try:
                work = self._group.recv([rest], peer, _REST_TAG)
            except RuntimeError as error:
                raise self._failed(peer, error) from error
            self._wait(work, peer, self._timeout_s)
            payload += rest.numpy().tobytes()
        return bytes([status]) + payload

    def _post_next(self, peer: int, buffer: Tensor) -> None:
        try:
            self._post(peer, buffer)
        except RuntimeError as error:
            raise self._failed(peer, error) from error

    def _loaded(self, rank: int, payload: bytes) -> Any:
        """What `rank` sent.

        Raises:
            ConnectorContractError: it could not pickle it, or this rank cannot unpickle it.
        """
        if payload[0] == _REFUSED:
            raise ConnectorContractError(f"rank {rank}: {payload[1:].decode(errors='replace')}")
        try:
            return pickle.loads(memoryview(payload)[1:])  # noqa: S301  from this job's own ranks
        except Exception as error:
            text = (
                f"rank {self._rank} cannot unpickle what rank {rank} sent: "
                f"{type(error).__name__}: {error}"
            )
            raise self._watch.judge(VerdictKind.BROKEN, self._rank, text).error() from error

    def _wait(self, work: dist.Work, peer: int, timeout_s: float | None) -> None:
        """Block until `work` with `peer` is done; a deadline ends that from another thread."""
        if timeout_s is not None:
            self._watch.expect(peer, timeout_s)
        try:
            work.wait(FOREVER)
        except RuntimeError as error:
            raise self._failed(peer, error) from error
        finally:
            self._watch.came()

    def _failed(self, peer: int, error: RuntimeError) -> Exception:
        if self._closed:
            return EngineClosed("DistributedCommunicator: was closed during an exchange")
        return self._watch.wait_for_verdict(peer, str(error)).error()

    def _diverged(self, peer: int, its_kind: int, number: int, kind: int) -> Exception:
        text = (
            f"rank {self._rank} is in exchange {self._number}, {_KINDS[kind]}; rank {peer} in "
            f"exchange {number}, {_KINDS.get(its_kind, 'unknown')}"
        )
        return self._watch.judge(VerdictKind.DIVERGED, peer, text).error()


def _members(ranks: Sequence[int] | None) -> list[int]:
    """The ranks of the default group that are meant.

    Raises:
        ConfigurationError: torch.distributed is not initialized, or `ranks` are not its.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigurationError(
            "DistributedCommunicator: torch.distributed is not initialized; call "
            "torch.distributed.init_process_group first, on every rank"
        )
    world = dist.get_world_size()
    members = [*range(world)] if ranks is None else list(ranks)
    if not members or members != sorted(set(members)) or not set(members) <= {*range(world)}:
        raise ConfigurationError(
            f"ranks: {members} must be ascending, different numbers below {world}"
        )
    return members
