"""Ranks of one engine, each a process, over gloo. A test tells them what to do, one call at a time.

They come from a process that has imported what they need, so that a job takes no second to start.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

_CONTEXT = multiprocessing.get_context("forkserver")

LIMIT_S = 60.0


@dataclass(frozen=True)
class Raised:
    """What a call raised on a rank, instead of its answer."""

    name: str
    text: str
    rank: int | None
    seconds: float


def _serve(
    rank: int, size: int, meeting: str, settings: dict[str, Any], orders: Connection
) -> None:
    import torch
    import torch.distributed as dist
    from rank_engine import Host

    from kvconnect.connector.ranks.distributed import DistributedCommunicator
    from kvconnect.connector.ranks.watch import END_S, do_within

    torch.set_num_threads(1)
    where = dist.FileStore(meeting, size)
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=where, rank=rank, world_size=size, timeout=timeout)
    host = Host(DistributedCommunicator(**settings))
    orders.send(None)
    with suppress(EOFError):
        while (order := orders.recv()) is not None:
            function, args = order
            began = time.monotonic()
            try:
                answer = function(host, *args)
            except Exception as error:  # noqa: BLE001  whatever it is, the test looks at it
                seconds = time.monotonic() - began
                lost = getattr(error, "rank", None)
                answer = Raised(type(error).__name__, str(error), lost, seconds)
            orders.send(answer)
    host.close()
    # As a rank of an engine ends: a sum of the model's whose other side is gone may keep gloo's
    # thread, and who drops the group waits for that.
    do_within(END_S, dist.destroy_process_group)
    os._exit(0)


class Job:
    """`size` ranks. What is called here happens on all of them at once.

    Args:
        size: how many.
        folder: for the file through which they find each other.
        settings: of their communicators.
    """

    def __init__(self, size: int, folder: Path, **settings: Any) -> None:
        self.size = size
        meeting = str(folder / f"ranks-{time.monotonic_ns()}")
        self._orders: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(
                target=_serve, args=(rank, size, meeting, settings, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._orders.append(ours)
            self.processes.append(process)
        for rank in range(size):
            self._answer(rank)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for orders in self._orders:
            with suppress(OSError):
                orders.send(None)
        until = time.monotonic() + 60
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        late = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for orders in self._orders:
            orders.close()
        assert not late, f"ranks {late} did not end"

    def __call__(
        self, function: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None
    ) -> list[Any]:
        """What `function` returns, or raises, on each of `ranks`, by default on all."""
        called = [*range(self.size)] if ranks is None else [*ranks]
        self.begin(function, *args, ranks=called)
        return self.answers(called)

    def begin(self, function: Callable[..., Any], *args: Any, ranks: Iterable[int]) -> None:
        """Call `function` on `ranks`; `answers` waits for what comes of it."""
        for rank in ranks:
            self._orders[rank].send((function, args))

    def answers(self, ranks: Iterable[int]) -> list[Any]:
        """What came of it on each of `ranks`."""
        return [self._answer(rank) for rank in ranks]

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to the process of `rank`; one that was killed is gone afterwards."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)
        if number == signal.SIGKILL:
            self.processes[rank].join(60)

    def _answer(self, rank: int) -> Any:
        if not self._orders[rank].poll(LIMIT_S):
            raise TimeoutError(f"rank {rank} does not answer for {LIMIT_S:g} s")
        return self._orders[rank].recv()
