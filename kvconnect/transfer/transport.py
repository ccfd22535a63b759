"""The interface: a transport reads memory of other processes into registered memory of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from kvconnect.errors import PeerUnreachable, PullFailed
from kvconnect.transfer.pull import Pull, Terminal
from kvconnect.transfer.reads import Reads

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
        incarnation: of its transport; another one after a restart or a rebuild.
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

    A read does not validate bytes: if a peer has reused its memory since, the read delivers the new
    content. Leases decide about that, not the transport. Thread-safe; owns its threads. Only
    `open`, `register`, `connect`, `rebuild` and `close` block, each for a bounded time.

    Attributes:
        name: as in settings: ``tcp`` or ``nixl``.
        quiescent_after_error: `Pull.terminal` follows by itself when a peer died or was cut off.
            If not, it may come with `rebuild` only.
    """

    name: ClassVar[str]
    quiescent_after_error: bool

    @abstractmethod
    def open(self) -> None:
        """Starts threads and whatever peers connect to.

        Raises:
            ConfigurationError: a setting is wrong, or a library is missing or of no use here;
                nothing is left open.
        """

    @abstractmethod
    def register(self, memory: Tensor) -> int:
        """Makes contiguous `memory` readable for peers and a destination of reads.

        Returns its region number. The memory is kept alive until `close`, and never changed but by
        reads into it. Peers that got `local` before do not know it.

        Raises:
            ConfigurationError: it is not contiguous, empty, or cannot be registered.
        """

    @abstractmethod
    def local(self) -> bytes:
        """Returns what a peer needs for `connect`; another after `register` and `rebuild`."""

    @abstractmethod
    def connect(self, peer_local: bytes) -> PeerHandle:
        """Makes reads from the transport possible whose `local` this is.

        Replaces an earlier incarnation of the same identity: pulls from that fail. Blocks for a
        few seconds at most: to be called where the peer's HELLO is received, not in a step.

        Raises:
            PeerUnreachable: no answer, another incarnation answers, the secret differs, or the
                bytes are of another transport or version. Nothing was replaced.
        """

    @abstractmethod
    def disconnect(self, peer: PeerHandle) -> None:
        """Fails the peer's pulls and forgets it; again is harmless."""

    @abstractmethod
    def pull(self, peer: PeerHandle, reads: Reads, *, deadline_s: float) -> Pull:
        """Begins to read; never blocks.

        A peer that is gone, disconnected or has no such memory fails `Pull.done`, not this call.

        Raises:
            ConfigurationError: the local side of `reads` is outside of registered memory, or
                `deadline_s` is not positive.
            UsageError: the transport is not open.
        """

    @abstractmethod
    def rebuild(self) -> None:
        """Ends every pull and restarts with the same memory.

        Afterwards every pull is terminal, no handle is valid, and peers need the new `local`.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends every pull, all connections and threads; again is harmless.

        Afterwards every pull is terminal and no registered memory is read or written.
        """
