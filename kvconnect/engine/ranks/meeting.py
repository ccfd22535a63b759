"""The meeting of an engine's ranks before they are connected: a store of torch.distributed."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    rendezvous,
)

from kvconnect import errors
from kvconnect.errors import ConfigurationError, KvConnectError, RankLost

_LOADING = timedelta(hours=2)
_POLL_S = 0.02
_BEAT_S = 1.0
_SILENT_S = 60.0
"""The most seconds without a sign of life of a rank that loads its model."""
_HERE = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The report of a rank that its model is loaded, or that loading failed.

    Attributes:
        digest: the digest of the model, in hexadecimal.
        free_nbytes: bytes of its device that the cache may take; 0: no limit.
        divided: the names of the recurrent states that it divides with the others.
        pid: the id of its process.
        error: class and text of the error, if loading failed.
    """

    digest: str = ""
    free_nbytes: int = 0
    divided: Sequence[str] = ()
    error: Sequence[str] | None = None
    pid: int = field(default_factory=os.getpid)


class Meeting:
    """A rank's access to the store in which the ranks of an engine meet.

    Args:
        store: the store of torch.distributed, with the names of this engine alone.
        rank: the number of this rank.
        size: the number of ranks.

    Attributes:
        store: the argument.
        port: the port of the store, if this rank made it.
    """

    def __init__(self, store: Store, rank: int, size: int, *, port: int = 0) -> None:
        self.store, self.port = store, port
        self._rank, self._size = rank, size

    @classmethod
    def opened(cls, size: int) -> Meeting:
        """Makes the leader's meeting, on a free port of this machine's loopback."""
        # By default the store would listen to the whole network.
        listener = socket.create_server((_HERE, 0))
        port = listener.getsockname()[1]
        store = TCPStore(
            _HERE,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_LOADING,
            master_listen_fd=listener.detach(),
        )
        return cls(PrefixStore("kvconnect", store), 0, size, port=port)

    @classmethod
    def joined(cls, port: int, rank: int, size: int) -> Meeting:
        """Makes a follower's meeting; blocks until the leader's exists."""
        store = TCPStore(_HERE, port, is_master=False, timeout=_LOADING)
        return cls(PrefixStore("kvconnect", store), rank, size)

    @classmethod
    def under_torchrun(cls, number: int) -> Meeting:
        """Makes any rank's meeting from the environment; `number` counts this process's engines."""
        store, rank, size = next(iter(rendezvous("env://", timeout=_LOADING)))
        return cls(PrefixStore(f"kvconnect/{number}", store), rank, size)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Reports a sign of life every second, while this rank loads its model."""
        over = threading.Event()

        def beat() -> None:
            with suppress(RuntimeError):  # the leader ended, which another thread watches
                for number in itertools.count():
                    self.store.set(f"beat/{self._rank}", str(number))
                    if over.wait(_BEAT_S):
                        return

        thread = threading.Thread(target=beat, name="kvconnect-loading", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def say_loaded(self, loaded: Loaded) -> None:
        """Reports that this rank's model is loaded, or that loading failed."""
        self.store.set(f"loaded/{self._rank}", json.dumps(asdict(loaded)))

    def wait_for_all(self, check: Callable[[], None]) -> list[Loaded]:
        """Returns every rank's report, by rank; the leader waits for them.

        Args:
            check: raises if a rank without a report has ended.

        Raises:
            KvConnectError: the error of a rank whose loading failed.
            RankLost: a rank that loads its model has stopped to send signs of life.
        """
        missing = [*range(self._size)]
        said: dict[int, Loaded] = {}
        beats = _Beats(self.store)
        while missing:
            for rank in [rank for rank in missing if self.store.check([f"loaded/{rank}"])]:
                said[rank] = Loaded(**json.loads(self.store.get(f"loaded/{rank}")))
                missing.remove(rank)
                if (error := said[rank].error) is not None:
                    raise rank_error(rank, error)
            if missing:
                check()
                for rank in missing:
                    beats.check(rank)
                time.sleep(_POLL_S)
        return [said[rank] for rank in range(self._size)]

    def go_on(self) -> None:
        """Reports that all ranks have loaded, so that the others connect. Called by the leader."""
        self.store.set("go", "")

    def say_connecting(self) -> None:
        """Reports that this rank begins to connect."""
        self.store.set(f"connecting/{self._rank}", "")

    def say_connected(self) -> None:
        """Reports that this rank is connected to all others."""
        self.store.set(f"connected/{self._rank}", "")

    def wait_until_all_connect(self, check: Callable[[], None], timeout_s: float) -> None:
        """Blocks until every rank begins to connect; called by the leader.

        Args:
            check: raises if a rank has ended.
            timeout_s: the most seconds to wait.

        Raises:
            RankLost: a rank did not begin in time; names it.
        """
        until = time.monotonic() + timeout_s
        while (rank := self._first_without("connecting")) is not None:
            check()
            if time.monotonic() > until:
                raise _not_connected(rank, timeout_s)
            time.sleep(_POLL_S)

    def lost_rank(self, seconds: float) -> RankLost:
        """Returns the leader's error for ranks that did not connect within `seconds`."""
        rank = self._first_without("connected")
        return _not_connected(self._size - 1 if rank is None else rank, seconds)

    def _first_without(self, what: str) -> int | None:
        others = range(1, self._size)
        return next((one for one in others if not self.store.check([f"{what}/{one}"])), None)

    def call_off(self, why: str) -> None:
        """Ends the waits of the other ranks, because the leader ends."""
        self.store.set("go", why)

    def close(self) -> None:
        """Closes the store; the leader stops listening. Idempotent."""
        self.store = HashStore()  # in this process alone

    def wait_to_go_on(self) -> None:
        """Blocks until the leader reports that all ranks have loaded.

        Raises:
            RankLost: the leader has ended.
        """
        self.store.wait(["go"], _LOADING)
        if why := self.store.get("go").decode():
            raise RankLost(0, f"rank 0 did not continue: {why}")


class _Beats:
    """The times of the last signs of life of loading ranks."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._heard: dict[int, tuple[bytes, float]] = {}

    def check(self, rank: int) -> None:
        """Checks that the rank sent a new sign of life in the last minute.

        Raises:
            RankLost: the rank has not; names it.
        """
        if not self._store.check([key := f"beat/{rank}"]):
            return
        beat, now = self._store.get(key), time.monotonic()
        before, since = self._heard.get(rank, (b"", now))
        if beat != before:
            self._heard[rank] = beat, now
        elif now - since > _SILENT_S:
            text = f"rank {rank} is lost: no sign of life for {_SILENT_S:g} s while it loaded"
            raise RankLost(rank, f"{text} the model")


def _not_connected(rank: int, seconds: float) -> RankLost:
    return RankLost(rank, f"rank {rank} is lost: it did not connect within {seconds:.1f} s")


def rank_error(rank: int, error: Sequence[str]) -> KvConnectError:
    """Returns the leader's error for a rank's error at its start, given as class and text."""
    name, text = error
    made = getattr(errors, name, None)
    if isinstance(made, type) and issubclass(made, ConfigurationError):
        return made(f"rank {rank}: {text}")
    return RankLost(rank, f"rank {rank} could not start: {name}: {text}")


def torchrun_rank(size: int) -> int | None:
    """Returns this process's rank under ``torchrun``; ``None`` without it.

    Raises:
        ConfigurationError: there are not `size` processes.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    world = int(os.environ["WORLD_SIZE"])
    if world != size:
        raise ConfigurationError(
            f"tensor_parallel_size: {size}, and torchrun started {world} processes; "
            f"use --nproc-per-node={size}"
        )
    if (local := int(os.environ["LOCAL_WORLD_SIZE"])) != size:
        raise ConfigurationError(
            f"tensor_parallel_size: torchrun started {local} of {size} processes on this machine; "
            "the ranks of an engine share one"
        )
    return int(os.environ["RANK"])
