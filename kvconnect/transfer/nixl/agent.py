"""The calls of NIXL that a transport needs. One thread makes them all: none is thread-safe."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from kvconnect.errors import ConfigurationError
from kvconnect.transfer.nixl.transfers import Transfer
from kvconnect.transfer.regions import Region

# Arriving data wakes the progress thread; this is its period without data. Once it polls, it
# spins until all transfers under way are done, and its lock blocks the thread that polls them. A
# period of 3 ms costs up to half the speed where cores are few, and 1 % of a core when idle.
_PROGRESS_DELAY_US = 100_000
_ENGINE_CONFIG = (
    "TCP_USER_TIMEOUT=2s",
    "TCP_KEEPIDLE=1s",
    "TCP_KEEPINTVL=1s",
    "TCP_KEEPCNT=2",
    "TCP_TX_SEG_SIZE=256k",
    "TCP_RX_SEG_SIZE=256k",
    "CMA_TX_QUOTA=16",
)
"""The settings of UCX. The first four turn a partition into a disconnect within about 2 s; by
default reads never end. The segment sizes, 8 KiB by default, make reads over TCP 1.5 times as
fast. With the last, UCX checks its sockets after 16 local copies, not after each. Settings of the
environment take precedence.
"""


class AgentError(Exception):
    """The error of a call that NIXL refused, or of a transfer that failed."""


class Agent:
    """A NIXL agent with the UCX backend, and the memory that is registered with it.

    Args:
        bindings: the bindings that `library.load` returned.
        name: a name that no agent had before: peers keep what they know of an agent by its name.
        device: the network device that UCX listens on and uses; ``all`` for all.
        tls: the only transport that UCX may use; ``None`` allows all.

    Raises:
        ConfigurationError: the backend cannot be made.
    """

    def __init__(self, bindings: Any, name: str, device: str, tls: str | None) -> None:
        self._nixl = bindings
        config = bindings.nixlAgentConfig()
        config.useProgThread = True  # without it a target may be aborted by its reader's death
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        settings = list(_ENGINE_CONFIG)
        settings += [f"TLS={tls}"] if tls else []
        # Not the parameter "device_list", which takes names of RDMA devices only.
        settings += [f"NET_DEVICES={device}"] if device != "all" else []
        engine = ",".join(settings)
        try:
            self._agent = self._call(bindings.nixlAgent, name, config)
            # The list of plug-ins names some that cannot be loaded: making one is the probe.
            self._ucx = self._call(
                self._agent.createBackend,
                "UCX",
                {"ucx_error_handling_mode": "peer", "engine_config": engine},
            )
        except AgentError as error:
            raise ConfigurationError(
                f"NIXL cannot make its UCX backend here: {error}; with UCX_LOG_LEVEL=warn and "
                "NIXL_LOG_LEVEL=WARN in the environment they say more"
            ) from error
        self._registered: list[Any] = []

    def register(self, region: Region) -> None:
        """Registers the memory of `region`, so that peers can read it and reads can write to it.

        Raises:
            AgentError: UCX cannot register the memory.
        """
        rows = np.array([[region.address, region.nbytes, region.device]], np.uint64)
        listed = self._nixl.nixlRegDList(self._kind(host=region.host), rows)
        self._call(self._agent.registerMem, listed, [self._ucx])
        self._registered.append(listed)

    def metadata(self) -> bytes:
        """Returns the bytes for a peer's `add_peer`. They change with `register`."""
        return bytes(self._call(self._agent.getLocalMD))

    def add_peer(self, metadata: bytes) -> str:
        """Connects to the agent whose `metadata` these are; returns its name.

        Raises:
            AgentError: no agent answers.
        """
        name = self._call(self._agent.loadRemoteMD, metadata)
        name = name.decode() if isinstance(name, bytes) else str(name)
        self._call(self._agent.makeConnection, name, [self._ucx])
        return name

    def reaches(self, name: str) -> bool:
        """Returns whether no failure of the connection to a peer is known. Does not block.

        Sends the peer a notification, the only call that detects a failure: see
        `drop_notifications`.
        """
        try:
            self._call(self._agent.genNotif, name, "", [self._ucx])
        except AgentError:
            return False
        return True

    def drop_notifications(self) -> int:
        """Discards the notifications of peers, which NIXL keeps otherwise; returns their number."""
        try:
            taken = self._call(self._agent.getNotifs, {}, [self._ucx])
        except AgentError:
            return 0
        return sum(len(sent) for sent in taken.values())

    def remove_peer(self, name: str) -> None:
        """Forgets a peer to which no transfer is under way. An unknown peer is ignored.

        UCX keeps the connection to a live peer, on both sides, until either agent ends.
        """
        with suppress(AgentError):
            self._call(self._agent.invalidateRemoteMD, name)

    def read(self, peer: str, transfer: Transfer) -> int:
        """Prepares a read of a peer's memory and returns its number; does not begin it.

        Raises:
            AgentError: the peer is not known, or the memory is not registered.
        """
        nixl = self._nixl
        return int(
            self._call(
                self._agent.createXferReq,
                nixl.NIXL_READ,
                nixl.nixlXferDList(self._kind(host=transfer.local_host), transfer.local),
                nixl.nixlXferDList(self._kind(host=transfer.remote_host), transfer.remote),
                peer,
                b"",
                [self._ucx],
            )
        )

    def begin(self, transfer: int) -> bool:
        """Begins a transfer; returns whether it is done.

        Between local processes it is done at once, since UCX copies in the call.

        Raises:
            AgentError: the transfer failed.
        """
        return self._done(self._call(self._agent.postXferReq, transfer, b""))

    def check(self, transfer: int) -> bool:
        """Returns whether a transfer is done.

        Raises:
            AgentError: the transfer failed.
        """
        return self._done(self._call(self._agent.getXferStatus, transfer))

    def release(self, transfer: int) -> None:
        """Frees a transfer that is done or failed; one under way would continue to write."""
        with suppress(AgentError):
            self._call(self._agent.releaseXferReq, transfer)

    def destroy(self) -> None:
        """Ends the agent and its transfers: no byte lands any more. No method works afterwards."""
        for listed in self._registered:
            with suppress(AgentError):
                self._call(self._agent.deregisterMem, listed, [self._ucx])
        self._registered.clear()
        del self._agent

    def _done(self, status: Any) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise AgentError(str(status))

    def _kind(self, *, host: bool) -> Any:
        return self._nixl.DRAM_SEG if host else self._nixl.VRAM_SEG

    def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except Exception as error:  # noqa: BLE001  its errors have no base of their own
            reason = str(error) or type(error).__name__
        del method, arguments  # the error's frames must not keep a destroyed agent alive
        raise AgentError(reason)
