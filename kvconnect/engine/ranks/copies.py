"""Makes the copies that the leader's block manager orders on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby

from torch import Tensor

from kvconnect.cache.memory.copier import BlockCopier, TensorCopier
from kvconnect.engine.model.state_memory import StateMemory, StateRestore
from kvconnect.engine.ranks.messages import BlockCopy
from kvconnect.errors import UsageError
from kvconnect.layout import KvCacheLayout


class LoggedCopier(TensorCopier):
    """A `TensorCopier` that logs its copies.

    A copy that raised is not logged, because the engine ends.

    Args:
        log: receives every copy that was made, in order.
        pools, host_pools, layouts: the arguments of `TensorCopier`.
    """

    def __init__(
        self,
        log: list[BlockCopy | StateRestore],
        pools: Sequence[Tensor],
        host_pools: Sequence[Tensor | None],
        layouts: Sequence[KvCacheLayout],
    ) -> None:
        super().__init__(pools, host_pools, layouts)
        self._log = log

    def onboard(self, group: int, host_ids: Sequence[int], ids: Sequence[int]) -> None:
        """Implements `BlockCopier`."""
        super().onboard(group, host_ids, ids)
        self._log.append(BlockCopy("onboard", group, _ints(host_ids), _ints(ids)))

    def offload(self, group: int, ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Implements `BlockCopier`."""
        super().offload(group, ids, host_ids)
        self._log.append(BlockCopy("offload", group, _ints(ids), _ints(host_ids)))

    def copy_tokens(
        self, group: int, source: int, target: int, num_tokens: int, *, from_host: bool = False
    ) -> None:
        """Implements `BlockCopier`."""
        super().copy_tokens(group, source, target, num_tokens, from_host=from_host)
        ids = (int(source),), (int(target),)
        self._log.append(BlockCopy("copy_tokens", group, *ids, int(num_tokens), from_host))

    def move(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Implements `BlockCopier`."""
        super().move(group, sources, targets)
        self._log.append(BlockCopy("move", group, _ints(sources), _ints(targets)))


def make_copies(
    copier: TensorCopier,
    copies: Sequence[BlockCopy | StateRestore],
    states: StateMemory | None = None,
) -> None:
    """Makes `copies`, in order.

    Args:
        copier: the copier of the pools.
        copies: the copies.
        states: the memory of recurrent states; ``None``: no snapshot is copied to a slot.

    Raises:
        UsageError: a snapshot is to be copied, and there are no `states`.
    """
    for is_restore, run in groupby(copies, key=lambda one: isinstance(one, StateRestore)):
        # Copies between blocks that follow each other are one batch.
        with nullcontext() if is_restore else copier.together():
            for one in run:
                _make(copier, one, states)


def _make(copier: BlockCopier, one: BlockCopy | StateRestore, states: StateMemory | None) -> None:
    if isinstance(one, StateRestore):
        if states is None:
            raise UsageError(f"the leader sent {one}, and this rank's model has no states")
        states.restore(one)
        return
    if one.order == "copy_tokens":
        ids = one.sources[0], one.targets[0]
        copier.copy_tokens(one.group, *ids, one.num_tokens, from_host=one.from_host)
    else:
        getattr(copier, one.order)(one.group, one.sources, one.targets)


def _ints(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, ids))
