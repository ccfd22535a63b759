"""What a test of the communicator calls on a rank, and a value that only its sender can read."""

from __future__ import annotations

import itertools
import time
from typing import Any

from rank_engine import Host

from kvconnect.engine.ranks.sums import ModelSums


class Unreadable:
    """Is pickled, but cannot be unpickled."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("planted")


def exchange(host: Host, sizes: list[int]) -> list[tuple[int, list[int]]]:
    """Broadcast and gather values of these sizes in bytes; what arrives, each as (byte, length)."""
    ranks, seen = host.communicator, []
    for number, size in enumerate(sizes):
        told = ranks.broadcast(bytes([number]) * size if ranks.rank == 0 else None)
        assert told == bytes([number]) * size
        gathered = ranks.allgather(bytes([ranks.rank]) * (size + ranks.rank))
        seen.append((len(told), [one.count(rank) for rank, one in enumerate(gathered)]))
    return seen


def broadcast(host: Host, value: Any = None) -> Any:
    return host.communicator.broadcast(value)


def gather(host: Host, value: Any = None) -> list[Any]:
    return host.communicator.allgather(value)


def step_for_ever(host: Host) -> None:
    """Exchange after exchange, until one raises."""
    while True:
        host.communicator.broadcast("work")
        host.communicator.allgather(host.communicator.rank)


def step_and_sum_for_ever(host: Host) -> None:
    """Steps with sums of a model's between their exchanges, until one raises."""
    import torch
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    sums = ModelSums(dist.group.WORLD, host.communicator, 120.0)
    for number in itertools.count():
        host.communicator.broadcast("work")
        for _ in range(8):
            sums.all_reduce(torch.ones(1000))
        assert len(host.communicator.allgather(number)) == 2


def exchange_for_ever(host: Host, nbytes: int) -> None:
    """Exchanges of so many bytes, until one raises."""
    while True:
        host.communicator.broadcast(bytes(nbytes))
        host.communicator.allgather(bytes(nbytes // 2))


def await_orders(host: Host, seconds: float) -> str:
    """The leader has nothing to tell for a while."""
    if host.communicator.rank == 0:
        time.sleep(seconds)
    return host.communicator.broadcast("work", idle=True)


def gather_own(host: Host) -> list[int]:
    return host.communicator.allgather(host.communicator.rank)


def gather_unpicklable(host: Host, rank: int) -> list[Any]:
    own = host.communicator.rank
    return host.communicator.allgather((lambda: own) if own == rank else own)


def broadcast_unpicklable(host: Host) -> Any:
    return host.communicator.broadcast(lambda: 1)


def leave(host: Host) -> None:
    host.communicator.close()


def check(host: Host, timeout_s: float = 0.0) -> None:
    host.communicator.check(timeout_s)


def wait_in_default_group(host: Host) -> None:
    """A collective of the model's own, for which a rank never comes."""
    import torch
    import torch.distributed as dist

    assert dist.group.WORLD is not None
    host.communicator.end_with_ranks(dist.group.WORLD)
    try:
        dist.all_reduce(torch.zeros(1))
    except RuntimeError:
        host.communicator.check(5.0)


def broadcast_unreadable(host: Host) -> None:
    host.communicator.broadcast(Unreadable())


def fail(host: Host) -> None:
    host.communicator.fail(RuntimeError("planted"))
