"""The interface: a transport reads memory of other processes into registered memory of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from kvconnect.errors import PeerUnreachable, PullFailed
from kvconnect.transfer.pull import Pull, Terminal
from kvconnect.transfer.reads import Offsets, Reads

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PeerHandle",
    "PeerUnreachable",
    "Pull",
    "PullFailed",
    "Reads",
    "Terminal",
    "Transport",
]


class PeerHandle:
    """A connected peer, for the transport that returned it.

    Attributes:
        identity: the peer's name, the same after it restarts.
        incarnation: the name of its transport's opening; changes with a restart or a rebuild.
        regions: bytes of each memory that it has registered.
    """

    def __init__(self, identity: str, incarnation: str, regions: tuple[int, ...]) -> None:
        self.identity = identity
        self.incarnation = incarnation
        self.regions = regions

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.identity!r}, incarnation={self.incarnation!r})"


class Transport(ABC):
    """Reads memory of peers, one-sided: no Python code of the peer runs for a read.

    A read does not validate bytes: if a peer has reused its memory, the read delivers the new
    content. Leases decide whether bytes are valid. Thread-safe; owns its threads. Only
    `open`, `register`, `connect`, `rebuild` and `close` block, each for a bounded time.

    Attributes:
        quiescent_after_error: whether `Pull.terminal` is always set after a peer died or was cut
            off. If False, some pulls become terminal only with `rebuild`.
    """

    quiescent_after_error: bool

    @abstractmethod
    def open(self) -> None:
        """Starts the threads, and listens for peers.

        Raises:
            ConfigurationError: a setting is wrong, or a library is missing or not usable on this
                machine; nothing is left open.
        """

    @abstractmethod
    def register(self, memory: Tensor) -> int:
        """Makes contiguous `memory` readable for peers and a destination of reads.

        Returns its region number. The transport keeps the memory alive until `close`, and changes
        it only by reads into it. Peers that got `local` before do not know it.

        Raises:
            ConfigurationError: `memory` is not contiguous, is empty, or cannot be registered.
        """

    @abstractmethod
    def local(self) -> bytes:
        """Returns the bytes that a peer passes to `connect`; `register` and `rebuild` change them.

        Raises:
            UsageError: the transport is not open.
        """

    @abstractmethod
    def connect(self, peer_local: bytes) -> PeerHandle:
        """Connects to the peer whose `local` returned `peer_local`, so that `pull` can read there.

        Replaces an earlier incarnation of the same identity, whose pulls fail. Blocks for a few
        seconds at most: to be called where the peer's HELLO is received, not in a step.

        Raises:
            PeerUnreachable: no answer, another incarnation answers, the secret differs, or the
                bytes are of another transport or version. Nothing was replaced.
            UsageError: the transport is not open.
        """

    @abstractmethod
    def disconnect(self, peer: PeerHandle) -> None:
        """Fails the pulls from `peer` and forgets the peer. Idempotent."""

    @abstractmethod
    def pull(self, peer: PeerHandle, reads: Reads, *, deadline_s: float) -> Pull:
        """Begins to read `reads` from `peer`; never blocks.

        If the peer has ended, is disconnected or has no such memory, `Pull.done` fails, not this
        call.

        Raises:
            ConfigurationError: the local side of `reads` is outside of registered memory, or
                `deadline_s` is not positive.
            UsageError: the transport is not open.
        """

    def keep_digests(self, region: int, offsets: Offsets, nbytes: int, *, epoch: int) -> None:
        """Lets a transport digest pieces of registered memory before peers read them.

        The caller promises not to write to the pieces until it calls `drop_digests`. By default
        this does nothing, as after `close`. Never blocks.

        Args:
            region: the number that `register` returned.
            offsets: int64[n], bytes from the region's begin.
            nbytes: the size of each piece.
            epoch: the epoch of the lease under which peers read the pieces.
        """

    def drop_digests(self, epoch: int) -> None:
        """Forgets the digests of the lease `epoch`, whose pieces may now be written to.

        Does nothing if there are none. Never blocks.
        """

    @abstractmethod
    def rebuild(self) -> None:
        """Ends every pull and restarts with the same memory.

        Afterwards every pull is terminal, no handle is valid, and peers need the new `local`.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends every pull, all connections and threads. Idempotent.

        Afterwards every pull is terminal and no registered memory is read or written.
        """
