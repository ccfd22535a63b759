"""The `Transport` methods over NIXL. The modules beside this one do the work."""

from __future__ import annotations

import os
import re
import secrets
import threading
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from kvconnect.errors import ConfigurationError, PeerUnreachable, PullFailed, UsageError
from kvconnect.transfer.local import Local, decode, encode
from kvconnect.transfer.nixl.agent import Agent, AgentError
from kvconnect.transfer.nixl.agent_thread import AgentThread
from kvconnect.transfer.nixl.library import load, rdma_possible, shares_memory
from kvconnect.transfer.nixl.nixl_pull import NixlPull
from kvconnect.transfer.nixl.transfers import Base, transfers
from kvconnect.transfer.pull import Deadlines
from kvconnect.transfer.reads import pairs
from kvconnect.transfer.regions import MAX_REGIONS, Region, Regions, refusal, require_local
from kvconnect.transfer.transport import PeerHandle, Pull, Reads, Transport

if TYPE_CHECKING:
    from torch import Tensor

# With an offset below the size of any region added, it is still an int64.
_Address = Annotated[int, Field(ge=0, lt=1 << 62)]
_Device = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Place(Local):
    """The description that a `NixlTransport` sends to its peers, with all addresses."""

    transport: Literal["nixl"] = "nixl"
    addresses: Annotated[tuple[_Address, ...], Field(max_length=MAX_REGIONS)]
    devices: Annotated[tuple[_Device, ...], Field(max_length=MAX_REGIONS)]
    host: Annotated[tuple[bool, ...], Field(max_length=MAX_REGIONS)]
    metadata: bytes

    @property
    def agent(self) -> str:
        """The name of the transport's agent."""
        return agent_name(self.identity, self.incarnation)


def agent_name(identity: str, incarnation: str) -> str:
    """Returns the name of an agent, a different one for each incarnation."""
    return f"{identity}/{incarnation}"


def _disconnected(identity: str) -> PullFailed:
    return PullFailed("peer", f"{identity} was disconnected")


def _cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class NixlPeer(PeerHandle):
    """A peer's agent, and the addresses of its memory."""

    def __init__(self, place: _Place) -> None:
        super().__init__(place.identity, place.incarnation, place.regions)
        self.place = place
        self.connected = True


class NixlTransport(Transport):
    """Reads through NIXL's UCX backend: RDMA, shared memory or TCP.

    Between processes of one machine UCX copies with ``process_vm_readv``, also from a frozen peer.
    One core does that, with a call for each run. So two agents, each with a thread, share pulls of
    more than 8 MiB. Peers know the first agent; the second one only reads.

    A killed peer is detected at once, a partition in 2 s, and a frozen peer over TCP only by a
    pull's deadline. The pull is terminal when the peer wakes, or with `rebuild`.

    Over TCP, a process that was frozen while its reader ended (killed, or rebuilt) may be aborted
    by UCX when it wakes. Where there is no RDMA, `TcpTransport` is the better choice.

    UCX listens on every device that it uses and authenticates no peer. Any process that reaches
    these devices may read the memory of this process. So UCX is limited to loopback, and with it to
    this machine, unless `device` names another one. Name a device that only trusted machines reach.

    Args:
        identity: this transport's name, the same after a restart; random if not given.
        device: the network device as UCX names it: ``lo``, ``eth1``, ``mlx5_0:1``. ``all`` means
            those of ``UCX_NET_DEVICES``, or every device.
        tls: the only transport that UCX may use: ``tcp``, ``cma``. To allow several, set
            ``UCX_TLS`` for the whole process.
        connect_timeout_s: the longest time of `connect`.
    """

    def __init__(
        self,
        *,
        identity: str | None = None,
        device: str = "lo",
        tls: str | None = None,
        connect_timeout_s: float = 2.0,
    ) -> None:
        if tls is not None and (not tls or not tls.replace("_", "").isalnum()):
            raise ConfigurationError(f"tls={tls!r}: must be the name of one of UCX's transports")
        if not re.fullmatch(r"[\w.:-]+", device):
            raise ConfigurationError(
                f"device={device!r}: must be one name, or all (and several in UCX_NET_DEVICES)"
            )
        if not connect_timeout_s > 0:
            raise ConfigurationError(f"connect_timeout_s={connect_timeout_s}: must be > 0")
        self._identity = identity or f"nixl-{secrets.token_hex(8)}"
        self._device = device
        self._tls = tls
        self._connect_s = connect_timeout_s
        self.quiescent_after_error = not rdma_possible(tls, device)
        self._regions = Regions()
        self._changing = threading.Lock()  # held by each method that blocks
        self._lock = threading.Lock()  # guards the two below; never held during a blocking call
        self._peers: dict[str, NixlPeer] = {}
        self._joining: str | None = None
        """The name of the agent that `connect` is connecting to."""
        self._thread: AgentThread | None = None
        """The thread of the agent that peers know."""
        self._second: AgentThread | None = None
        """The thread of a second agent that shares large pulls; ``None`` where it does not help."""
        self._deadlines: Deadlines | None = None
        self._local = b""

    def open(self) -> None:
        """Makes the agent, as `Transport.open` describes.

        Raises:
            MissingExtra: nixl is not installed.
            ConfigurationError: nixl is not usable on this machine.
        """
        with self._changing:
            if self._thread is not None:
                raise UsageError("the transport is open")
            self._thread = AgentThread(quiescent=self.quiescent_after_error)
            try:
                if shares_memory(self._tls, self._device) and _cores() > 1:
                    self._second = AgentThread(quiescent=self.quiescent_after_error)
                self._create(self._thread)
                self._deadlines = Deadlines()
            except BaseException:
                self._destroy(PullFailed("closed", "the transport could not be opened"))
                self._end_threads()
                raise

    def register(self, memory: Tensor) -> int:
        """Registers `memory`, as `Transport.register` describes, before or after `open`.

        Blocks while memory is pinned.
        """
        with self._changing:
            number = self._regions.add(memory)
            thread = self._thread
            if thread is not None:
                try:
                    self._register(self._regions[number])
                except AgentError as error:
                    self._regions.remove_last()
                    raise ConfigurationError(
                        f"memory on {memory.device} cannot be registered with NIXL: {error}"
                    ) from error
                self._publish(thread)
        return number

    def local(self) -> bytes:
        """Returns the bytes that a peer passes to `connect`, as `Transport.local` describes."""
        if self._thread is None:
            raise UsageError("the transport is not open")
        return self._local

    def connect(self, peer_local: bytes) -> NixlPeer:
        """Connects as `Transport.connect` describes. Blocks for at most `connect_timeout_s`."""
        with self._changing:
            thread = self._thread
            if thread is None:
                raise UsageError("the transport is not open")
            place = decode(_Place, peer_local)
            if (
                not len(place.addresses)
                == len(place.devices)
                == len(place.host)
                == len(place.regions)
            ):
                raise PeerUnreachable("the peer's local(): not one address for each region")
            with self._lock:
                self._joining = place.agent
            try:
                self._reach(thread, place)
            except BaseException:
                with self._lock:
                    self._joining = None
                    if place.agent not in {one.place.agent for one in self._peers.values()}:
                        self._disconnect(place.agent, _disconnected(place.identity), then="forget")
                raise
            peer = NixlPeer(place)
            with self._lock:
                self._joining = None
                earlier = self._peers.get(place.identity)
                self._peers[place.identity] = peer
                if earlier is not None:
                    earlier.connected = False
                    if earlier.incarnation != place.incarnation:
                        self._disconnect(
                            earlier.place.agent,
                            PullFailed("peer", f"{place.identity} connected anew"),
                            then="forget",
                        )
            return peer

    def disconnect(self, peer: PeerHandle) -> None:
        """Fails the pulls from `peer` and forgets the peer. Idempotent; does not block."""
        known = self._known(peer)
        with self._lock:
            connected, known.connected = known.connected, False
            if not connected or self._thread is None:
                return
            if self._peers.get(known.identity) is known:
                del self._peers[known.identity]
            self._disconnect(
                known.place.agent,
                _disconnected(known.identity),
                # The handle that `connect` is making reads from this agent.
                then="use" if known.place.agent == self._joining else "keep",
            )

    def pull(self, peer: PeerHandle, reads: Reads, *, deadline_s: float) -> Pull:
        """Begins to read, as `Transport.pull` describes. Does not block."""
        known, thread, deadlines = self._known(peer), self._thread, self._deadlines
        if thread is None or deadlines is None:
            raise UsageError("the transport is not open")
        require_local(self._regions, reads, deadline_s)
        pull = NixlPull(reads.total_nbytes)
        refused = refusal(known.identity, known.regions, reads)
        if not known.connected:
            refused = PullFailed("peer", f"{known.identity} is disconnected")
        if refused is not None or not reads.total_nbytes:
            pull.finish(refused)
            return pull
        deadlines.watch(pull, deadline_s)
        thread.submit(pull, known.place.agent, lambda _: self._prepare(pull, known.place, reads))
        return pull

    def rebuild(self) -> None:
        """Destroys the agent and makes another one, as `Transport.rebuild` describes."""
        with self._changing:
            if self._thread is None:
                raise UsageError("the transport is not open")
            self._destroy(PullFailed("closed", "the transport is built anew"))
            self._create(self._thread)

    def close(self) -> None:
        """Ends every pull, all connections and threads. Idempotent; blocks."""
        with self._changing:
            if self._thread is not None:
                self._destroy(PullFailed("closed", "the transport was closed"))
                self._end_threads()
            if self._deadlines is not None:
                self._deadlines.close()
                self._deadlines = None
            self._regions.clear()

    def _threads(self) -> list[AgentThread]:
        return [thread for thread in (self._second, self._thread) if thread is not None]

    def _end_threads(self) -> None:
        for thread in self._threads():
            thread.close()
        self._thread = self._second = None

    def _create(self, first: AgentThread) -> None:
        bindings = load()
        incarnation = secrets.token_hex(16)
        name = agent_name(self._identity, incarnation)
        try:
            for thread in self._threads():
                own = name if thread is first else f"{name}/second"
                thread.create(lambda own=own: Agent(bindings, own, self._device, self._tls))  # type: ignore[misc]
            self._incarnation = incarnation
            for region in self._regions.all():
                self._register(region)
        except AgentError as error:
            self._destroy(PullFailed("closed", "the transport could not be opened"))
            raise ConfigurationError(f"memory cannot be registered with NIXL: {error}") from error
        except ConfigurationError:
            self._destroy(PullFailed("closed", "the transport could not be opened"))
            raise
        self._publish(first)

    def _register(self, region: Region) -> None:
        """Registers `region` with the agents, last with the one that peers know."""
        for thread in self._threads():
            if region.host or thread is self._thread:
                thread.call(lambda thread=thread: thread.agent.register(region))  # type: ignore[misc]

    def _disconnect(
        self, agent: str, error: PullFailed, *, then: Literal["forget", "keep", "use"]
    ) -> None:
        for thread in self._threads():
            thread.disconnect(agent, error, then=then)

    def _destroy(self, error: PullFailed) -> None:
        with self._lock:
            for peer in self._peers.values():
                peer.connected = False
            self._peers.clear()
        for thread in self._threads():
            thread.destroy(error)

    def _publish(self, thread: AgentThread) -> None:
        regions = self._regions.all()
        self._local = encode(
            _Place(
                identity=self._identity,
                incarnation=self._incarnation,
                regions=self._regions.sizes(),
                addresses=tuple(region.address for region in regions),
                devices=tuple(region.device for region in regions),
                host=tuple(region.host for region in regions),
                metadata=thread.call(thread.agent.metadata),
            )
        )

    def _reach(self, thread: AgentThread, place: _Place) -> None:
        try:
            thread.call(lambda: thread.reach(place.agent, place.metadata), self._connect_s)
        except AgentError as error:
            raise PeerUnreachable(f"{place.identity}: {error}") from error
        except TimeoutError as error:
            raise PeerUnreachable(
                f"{place.identity}: no answer within {self._connect_s:g} s"
            ) from error

    def _prepare(self, pull: NixlPull, place: _Place, reads: Reads) -> None:
        remote, local = pairs(reads)
        far, near = reads.remote_region, self._regions[reads.local_region]
        ours = Base(near.address, near.device, near.host)
        theirs = Base(place.addresses[far], place.devices[far], place.host[far])
        number = pull.add(transfers(local, ours, remote, theirs))
        if number > 1 and self._second is not None and ours.host and theirs.host:
            self._second.assist(pull, place.agent, place.metadata)

    def _known(self, peer: PeerHandle) -> NixlPeer:
        if not isinstance(peer, NixlPeer):
            raise UsageError(f"{peer!r} is no peer of a NixlTransport")
        return peer
