"""Computes the sums of a model that is divided among ranks."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from kvconnect.connector.ranks.distributed import DistributedCommunicator
from kvconnect.errors import RankLost

_LOOK_EVERY = timedelta(seconds=0.25)
_FIND_OUT_S = 5.0
"""The most seconds to wait for the name of the lost rank after a failed sum."""

_LEAVE_S = 1.0
"""The most seconds to wait for a sum in gloo after the engine has ended."""


class ModelSums:
    """Sums over all ranks; a sum ends when the ranks cannot continue together.

    gloo may wait for a sum for ever, or until its own timeout, although the other ranks have ended.
    The engine's thread waits in slices of 0.25 s and checks `communicator` after each.

    Args:
        group: the group of torch.distributed, with the ranks of `communicator`.
        communicator: ends the waits in `group` when a rank is lost.
        timeout_s: seconds that the others wait for a rank in a sum.
    """

    def __init__(
        self, group: dist.ProcessGroup, communicator: DistributedCommunicator, timeout_s: float
    ) -> None:
        self._group: dist.ProcessGroup | None = group
        self._communicator = communicator
        self._options = dist.AllreduceOptions()
        self._options.timeout = timedelta(seconds=timeout_s)
        self._work: dist.Work | None = None  # no frame has it: an error that is kept keeps those
        communicator.end_with_ranks(group)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces `tensor` by its sum over all ranks; collective, blocks until then on the CPU.

        Raises:
            RankLost: a rank died or is stopped; names it. `tensor` is undefined.
            ConnectorContractError: a rank failed; names it. `tensor` is undefined.
        """
        assert self._group is not None, "the sums are closed"  # noqa: S101
        try:
            self._work = self._group.allreduce([tensor], self._options)
            if tensor.device.type == "cpu":
                self._wait()
            else:
                self._work.wait()  # the stream waits, not this thread
        except RuntimeError as error:
            self._communicator.check(_FIND_OUT_S)
            rank = self._communicator.rank
            raise RankLost(rank, f"rank {rank}: {error}") from error

    def close(self) -> dist.ProcessGroup | None:
        """Ends the use of the group, and returns it; the communicator is closed. Idempotent.

        A group with a running sum must not be destroyed, because its destructor waits for the sum
        without limit. After a second, a thread keeps the group until the sum has ended, and
        ``None`` is returned.
        """
        group, self._group = self._group, None
        work, self._work = self._work, None
        if work is None or work.is_completed():
            return group
        keeper = threading.Thread(
            target=_keep, args=(group, work), name="kvconnect-rank-sum", daemon=True
        )
        keeper.start()
        keeper.join(_LEAVE_S)
        return None if keeper.is_alive() else group

    def _wait(self) -> None:
        assert self._work is not None  # noqa: S101
        while True:
            try:
                self._work.wait(_LOOK_EVERY)
            except RuntimeError:
                if self._work.is_completed():
                    # It may have ended only after the slice: the outcome is of a wait from now on.
                    self._work.wait()
                    return
            else:
                return
            self._communicator.check()


def _keep(_: dist.ProcessGroup | None, work: dist.Work) -> None:
    with suppress(RuntimeError):
        work.wait()
