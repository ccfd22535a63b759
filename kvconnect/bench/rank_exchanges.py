"""The cost of a step's two exchanges on two ranks, against a round trip of gloo.

The floor is a message there and one back, of four bytes each, by ``torch.distributed.send`` and
``recv``. The exchanges use connections without gloo's threads, so they may cost less.
"""

from __future__ import annotations

import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from kvconnect.bench.report import Figure
from kvconnect.bench.store.floor import seconds_of
from kvconnect.connector.ranks.communicator import Communicator, Instructions, Report, agreed
from kvconnect.connector.ranks.distributed import DistributedCommunicator

_RANKS = 2
_ROUNDS = 10  # exchanges and round trips alternate, so that other load slows both
_CONNECT = timedelta(seconds=60)


def rank_exchanges(scratch: Path, *, steps: int) -> list[Figure]:
    """Measures a step's two exchanges on two ranks, with nothing to load or save.

    Starts two processes, and blocks for some seconds.

    Args:
        scratch: a directory in which the processes find each other.
        steps: number of steps; the figures are medians.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_RANKS, mp_context=context) as processes:
        ranks = [
            processes.submit(_measure, rank, scratch / "ranks", max(1, steps // _ROUNDS))
            for rank in range(_RANKS)
        ]
        exchanges, trips = ranks[0].result()
        ranks[1].result()
    step, trip = statistics.median(exchanges), statistics.median(trips)
    return [
        Figure("two exchanges of a step", step * 1e6, "us"),
        Figure("floor: round trip of gloo", trip * 1e6, "us"),
        Figure("exchanges / floor", step / trip, "x", "<= 2.5"),
    ]


def _measure(rank: int, meeting: Path, repeats: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of each step's exchanges and of each round trip on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=meeting.absolute().as_uri(),
        rank=rank,
        world_size=_RANKS,
        timeout=_CONNECT,
    )
    exchanges: list[float] = []
    trips: list[float] = []
    with DistributedCommunicator() as communicator:
        for _ in range(1 + _ROUNDS):
            exchanges += [seconds_of(lambda: _step(communicator)) for _ in range(repeats)]
            trips += [seconds_of(lambda: _round_trip(rank)) for _ in range(repeats)]
        communicator.allgather(None)  # no rank leaves before the other is done
    dist.destroy_process_group()
    return exchanges[repeats:], trips[repeats:]  # without the first round


def _step(communicator: Communicator) -> None:
    communicator.broadcast(Instructions(1))
    agreed(communicator, Report(1))


def _round_trip(rank: int) -> None:
    message = torch.zeros(1)
    if rank == 0:
        dist.send(message, 1)
        dist.recv(message, 1)
    else:
        dist.recv(message, 0)
        dist.send(message, 0)
