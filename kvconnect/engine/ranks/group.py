"""The ranks of one engine, connected: their exchanges, and the model's sums."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from kvconnect.connector.ranks.distributed import DistributedCommunicator
from kvconnect.connector.ranks.watch import END_S, do_within
from kvconnect.engine.ranks.sums import ModelSums
from kvconnect.errors import ConfigurationError, EngineClosed

CONNECT_S = 30.0
"""The most seconds that ranks wait for another to connect, after all have loaded their models."""

_GLOO_PATIENCE = 5
"""The factor by which gloo waits longer for a connection than its timeout."""

_STEP_S = 120.0
"""The most seconds that one rank may compute longer than another, besides waits for loads."""

_INTERFACE = "GLOO_SOCKET_IFNAME"


class RankGroup:
    """The `ModelRanks` of a model, and their `Communicator`; used by one thread at a time.

    The group is made before the model is loaded, and connected afterwards.

    Args:
        rank: the number of this rank.
        size: the number of ranks.
        load_timeout_s: seconds that a rank may wait for a load in a step.
    """

    def __init__(self, rank: int, size: int, *, load_timeout_s: float = 0.0) -> None:
        self._rank, self._size = rank, size
        self._timeout_s = _STEP_S + load_timeout_s
        self._communicator: DistributedCommunicator | None = None
        self._sums: ModelSums | None = None
        self._owns_default = False

    @property
    def rank(self) -> int:
        """The number of this rank; 0 is the leader."""
        return self._rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._size

    def connect(self, store: Store, device: torch.device) -> None:
        """Connects to the others, over the loopback; collective.

        Blocks for `CONNECT_S` at most in each of three groups, if a rank is stopped. A rank that
        died ends the wait at once.

        Uses the user's default group of torch.distributed, if there is one; otherwise makes one,
        which `close` ends.

        Raises:
            ConfigurationError: the user's default group has another size.
            RuntimeError: torch.distributed's error if a rank does not connect.
        """
        try:
            with _loopback():
                self._connect(store, device)
        except Exception:
            if not dist.is_initialized():
                # torch counts groups that failed, too, and names groups by that: ranks that are
                # started anew begin with 0.
                dist.distributed_c10d._world.group_count = 0  # noqa: SLF001
            raise

    def _connect(self, store: Store, device: torch.device) -> None:
        connect_s = CONNECT_S / _GLOO_PATIENCE
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo",
                store=store,
                rank=self._rank,
                world_size=self._size,
                timeout=timedelta(seconds=connect_s),
            )
            self._owns_default = True
        elif (dist.get_rank(), dist.get_world_size()) != (self._rank, self._size):
            raise ConfigurationError(
                f"tensor_parallel_size: torch.distributed is initialized already, with "
                f"{dist.get_world_size()} ranks, and {self._size} are needed; a process has one "
                "engine of several ranks at a time"
            )
        # NCCL connects at the first sum.
        backend, wait_s = ("gloo", connect_s) if device.type == "cpu" else ("nccl", self._timeout_s)
        sums = dist.new_group(backend=backend, timeout=timedelta(seconds=wait_s))
        self._communicator = DistributedCommunicator(
            timeout_s=self._timeout_s, connect_timeout_s=connect_s
        )
        self._sums = ModelSums(sums, self._communicator, self._timeout_s)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all ranks, by `ModelSums`. Needs connected ranks."""
        if self._sums is not None:
            self._sums.all_reduce(tensor)

    @property
    def communicator(self) -> DistributedCommunicator:
        """The connection of all ranks.

        Raises:
            EngineClosed: the ranks are not connected.
        """
        if self._communicator is None:
            raise EngineClosed("the ranks are not connected")
        return self._communicator

    def fail(self, error: BaseException) -> None:
        """Sends `error` to the other ranks, if they are connected; see `Communicator.fail`."""
        if self._communicator is not None:
            self._communicator.fail(error)

    def close(self) -> None:
        """Leaves the group, and ends all waits in it. Idempotent."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()
        sums, self._sums = self._sums, None
        group = None if sums is None else sums.close()
        left = [] if group is None else [group]
        del group  # its end is the end of the last reference, which this thread must not have
        owns_default, self._owns_default = self._owns_default, False
        do_within(END_S, lambda: _destroy(left, with_default=owns_default))


def _destroy(groups: list[dist.ProcessGroup], *, with_default: bool) -> None:
    while groups:
        with suppress(ValueError):  # the job has destroyed it
            dist.destroy_process_group(groups.pop())
    if with_default and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def _loopback() -> Iterator[None]:
    """Makes new groups of gloo listen on the loopback only, unless configured otherwise.

    The exchanges are trusted: see `DistributedCommunicator`.
    """
    names = [name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}]
    if _INTERFACE in os.environ or not names:
        yield
        return
    os.environ[_INTERFACE] = names[0]
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
