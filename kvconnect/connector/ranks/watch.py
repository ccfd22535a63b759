"""The watch over the other ranks of an engine: heartbeats beside their exchanges."""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from kvconnect.errors import ConnectorContractError, KvConnectError, RankDivergence, RankLost

_FOREVER = timedelta(days=365)
"""The timeout of gloo's waits for heartbeats, in threads of the watch."""

_BEAT_TAG = 1
_END_TAG = 3  # no message uses it
_BEAT_EVERY_S = 0.25
_TELL_FOR = timedelta(milliseconds=200)
_LEAVE_S = 2.0
END_S = 2.0
"""The most seconds that the end of a group may take."""

_NOTE_NBYTES = 512
_NOTE = struct.Struct("<BqqH")  # kind, rank it is about, exchanges made, bytes of text


class VerdictKind(IntEnum):
    """The reason for the end of an engine's ranks; ``ALIVE`` and ``LEAVING`` are no verdicts."""

    ALIVE = 0
    LEAVING = 1
    LOST = 2
    DIVERGED = 3
    BROKEN = 4


_ERRORS: dict[VerdictKind, type[KvConnectError]] = {
    VerdictKind.DIVERGED: RankDivergence,
    VerdictKind.BROKEN: ConnectorContractError,
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reason for the end of the ranks, as the first of them to notice it reports it.

    Attributes:
        kind: the kind of error.
        rank: the rank that is lost or failed.
        text: the message, which names the rank.
    """

    kind: VerdictKind
    rank: int
    text: str

    def error(self) -> KvConnectError:
        """Returns a new error to raise."""
        if self.kind in _ERRORS:
            return _ERRORS[self.kind](self.text)
        return RankLost(self.rank, self.text)


def do_within(timeout_s: float, do: Callable[[], None]) -> None:
    """Calls `do` on a thread, for which this blocks up to `timeout_s` seconds.

    Used for calls of gloo that may never end: such a thread is abandoned. `do` must not raise.
    """
    thread = threading.Thread(target=do, name="kvconnect-rank-leave", daemon=True)
    thread.start()
    thread.join(max(0.0, timeout_s))


def end_group(group: dist.ProcessGroup) -> None:
    """Ends `group`: every wait in it, on any thread, raises at once. The group cannot be used then.

    Does nothing if the group has already been destroyed.

    gloo cannot be interrupted, and its ``abort()`` ends no wait; but a receive that times out
    closes every connection of its group, which ends all of them. Blocks for some milliseconds, and
    for `END_S` at most.
    """
    do_within(END_S, lambda: _end_group(group))


def _end_group(group: dist.ProcessGroup) -> None:
    try:
        backend = dist.get_backend(group)
    except ValueError:
        return
    if backend != "gloo":
        with suppress(RuntimeError):
            group.abort()
        return
    for rank in range(group.size()):
        if rank != group.rank():  # a connection that is closed already would not end the others
            with suppress(RuntimeError):
                work = group.recv([torch.empty(1, dtype=torch.uint8)], rank, _END_TAG)
                work.wait(timedelta(milliseconds=1))


class RankWatch:
    """Sends heartbeats to the other ranks and listens for theirs, on threads of its own.

    A rank whose process ended is noticed at once, by its closed connection; one that is stopped, or
    whose machine is gone, after `silence_s` without a heartbeat. The first rank to notice sends the
    verdict to the others before it closes its own connections, so that all name the same rank.
    Heartbeats continue while a rank computes. They do not show whether its engine's thread runs: a
    wait for that thread has a deadline of its own, see `judge_late`.

    Args:
        group: a gloo group that only this engine's communicator uses; ended with the first verdict.
        silence_s: seconds without a heartbeat after which a rank counts as lost.

    Attributes:
        verdict: the first reason for the end of the ranks; ``None`` while they run.
    """

    def __init__(self, group: dist.ProcessGroup, *, silence_s: float) -> None:
        self._group: dist.ProcessGroup | None = group
        self._rank = group.rank()
        self._peers = [rank for rank in range(group.size()) if rank != self._rank]
        self._silence_s = silence_s
        self._awake_s = 0.0  # seconds that this rank has run
        self._heard = dict.fromkeys(self._peers, self._awake_s)  # the last heartbeat, by that clock
        self._exchanges = dict.fromkeys(self._peers, 0)
        self._left: set[int] = set()
        self._lock = threading.Lock()
        self.verdict: Verdict | None = None
        self._over = threading.Event()
        self._closing = threading.Event()
        self._on_over: list[Callable[[], None]] = []
        # gloo reads what is sent until the other side has taken it. No thread waits for heartbeats,
        # and a rank counts as lost long before it has missed so many.
        self._sent: deque[dist.Work] = deque(maxlen=64 * len(self._peers))
        self.exchanges = 0
        self._threads = [
            threading.Thread(target=self._listen, args=(peer,), name=f"kvconnect-rank-{peer}")
            for peer in self._peers
        ]
        self._threads.append(threading.Thread(target=self._beat, name="kvconnect-rank-beat"))
        # On a thread of its own: gloo may keep the one that sends.
        self._threads.append(threading.Thread(target=self._look, name="kvconnect-rank-look"))
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def wait(self, timeout_s: float) -> Verdict | None:
        """Returns the verdict, or ``None``; blocks up to `timeout_s` for one."""
        if timeout_s and self.verdict is None:
            self._over.wait(timeout_s)
        return self.verdict

    def on_over(self, do: Callable[[], None]) -> None:
        """Registers `do`, called with the first verdict on a thread of this watch."""
        with self._lock:
            if self.verdict is None:
                self._on_over.append(do)
                return
        do()

    def judge(self, kind: VerdictKind, rank: int, text: str) -> Verdict:
        """Sends a verdict to the other ranks, and ends every wait for a rank.

        Returns:
            The verdict; an earlier one if there is one.
        """
        with self._lock:
            if self.verdict is not None:
                return self.verdict
            self.verdict = verdict = Verdict(kind, rank, text)
        self._tell(verdict)
        self._over.set()
        for do in self._on_over:
            do()
        if self._group is not None:
            end_group(self._group)
        return verdict

    def judge_late(self, peer: int, timeout_s: float) -> Verdict:
        """Declares `peer` lost, because this rank has waited for it for `timeout_s` seconds."""
        text = (
            f"rank {peer} is lost: its process lives, but did not come to exchange "
            f"{self.exchanges} within {timeout_s:g} s (it made {self._exchanges[peer]})"
        )
        return self.judge(VerdictKind.LOST, peer, text)

    def wait_for_verdict(self, peer: int, reason: str) -> Verdict:
        """Returns the verdict after an exchange with `peer` failed; blocks for up to two seconds.

        The threads that receive heartbeats decide: before `peer` closed the connection, it may have
        reported that another rank died.
        """
        until = time.monotonic() + 2.0
        while not self._over.wait(0.01) and time.monotonic() < until:
            if peer in self._left:
                reason = "it closed its communicator"
                break
        return self.judge(VerdictKind.LOST, peer, f"rank {peer} is lost: {reason}")

    def close(self) -> None:
        """Reports that this rank leaves, and ends the threads and the group; idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self.verdict is None:
            self._tell(Verdict(VerdictKind.LEAVING, self._rank, ""))
        if self._group is not None:
            end_group(self._group)
        until = time.monotonic() + _LEAVE_S
        for thread in self._threads:  # a thread that waits in gloo for ever is abandoned
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))
        # An error that is kept keeps its frames, and so this watch, but no descriptors.
        self._on_over.clear()
        self._sent.clear()
        self._group = None

    # ------------------------------------------------------------------ threads

    def _beat(self) -> None:
        while not (self._closing.wait(_BEAT_EVERY_S) or self._over.is_set()):
            self._send(Verdict(VerdictKind.ALIVE, self._rank, ""))

    def _look(self) -> None:
        """Declares a rank lost that has sent no heartbeat for too long."""
        last = time.monotonic()
        while not (self._closing.wait(_BEAT_EVERY_S) or self._over.is_set()):
            now = time.monotonic()
            # Time in which this rank itself was stopped, or had no processor, hardly counts: it has
            # yet to read the messages of that time.
            self._awake_s += min(now - last, self._silence_s / 4)
            last = now
            for peer, heard in self._heard.items():
                if self._awake_s - heard > self._silence_s and peer not in self._left:
                    text = f"rank {peer} is lost: no sign of life for {self._silence_s:g} s"
                    self.judge(VerdictKind.LOST, peer, text)
                    return

    def _listen(self, peer: int) -> None:
        buffer = torch.zeros(_NOTE_NBYTES, dtype=torch.uint8)
        if (group := self._group) is None:  # closed already
            return
        while not self._closing.is_set():
            try:
                group.recv([buffer], peer, _BEAT_TAG).wait(_FOREVER)
            except RuntimeError:
                self._disconnected(peer)
                return
            self._heard[peer] = self._awake_s
            if (verdict := self._read(peer, buffer)) is None:
                continue
            if verdict.kind is not VerdictKind.LEAVING:
                self.judge(verdict.kind, verdict.rank, verdict.text)
                return
            self._left.add(peer)

    def _disconnected(self, peer: int) -> None:
        # A rank that has left matters only to ranks that wait for it.
        if not (self._closing.is_set() or peer in self._left):
            self.judge(VerdictKind.LOST, peer, f"rank {peer} is lost: its process ended")

    # ------------------------------------------------------------------ messages

    def _send(self, verdict: Verdict) -> dict[int, dist.Work]:
        """Sends `verdict` to all ranks that have not left; does not block."""
        text = verdict.text.encode()[: _NOTE_NBYTES - _NOTE.size]
        head = _NOTE.pack(verdict.kind, verdict.rank, self.exchanges, len(text))
        data = (head + text).ljust(_NOTE_NBYTES, b"\0")
        note = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        works = {}
        group = self._group
        for peer in self._peers:
            if group is not None and peer not in self._left:
                with suppress(RuntimeError):  # closed: the listening thread finds the reason
                    works[peer] = group.send([note], peer, _BEAT_TAG)
        self._sent.extend(works.values())
        return works

    def _tell(self, verdict: Verdict) -> None:
        """Sends `verdict`; blocks for up to 2 s until all reachable ranks have received it."""
        do_within(END_S, lambda: self._tell_each(verdict))

    def _tell_each(self, verdict: Verdict) -> None:
        for peer, work in self._send(verdict).items():
            if not (verdict.kind is VerdictKind.LOST and peer == verdict.rank):
                with suppress(RuntimeError):
                    work.wait(_TELL_FOR)

    def _read(self, peer: int, buffer: Tensor) -> Verdict | None:
        """Returns the verdict that `peer` sent; ``None`` for a plain heartbeat."""
        data = buffer.numpy().tobytes()
        code, rank, exchanges, length = _NOTE.unpack_from(data)
        self._exchanges[peer] = exchanges
        if code == VerdictKind.ALIVE:
            return None
        text = data[_NOTE.size : _NOTE.size + length].decode(errors="replace")
        return Verdict(VerdictKind(code), rank, text)
