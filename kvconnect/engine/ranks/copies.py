"""Makes the copies that the leader's block manager orders on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kvconnect.cache.memory.copier import BlockCopier, TensorCopier
from kvconnect.engine.ranks.messages import BlockCopy, CopyKind
from kvconnect.layout import KvCacheLayout

__all__ = ["CopyLog", "make_copies"]


class CopyLog:
    """The log of copies since they were last taken, in order."""

    def __init__(self) -> None:
        self._copies: list[BlockCopy] = []

    def take(self) -> tuple[BlockCopy, ...]:
        """Returns the copies so far, each once."""
        taken, self._copies = tuple(self._copies), []
        return taken

    def add(self, copy: BlockCopy) -> None:
        """Adds a copy that was made."""
        self._copies.append(copy)

    def copier(
        self,
        pools: Sequence[Tensor],
        host_pools: Sequence[Tensor | None],
        layouts: Sequence[KvCacheLayout],
    ) -> TensorCopier:
        """Makes a `TensorCopier` whose copies are in this log."""
        return _LoggedCopier(self, pools, host_pools, layouts)


class _LoggedCopier(TensorCopier):
    """A `TensorCopier` that keeps a log. A copy that raised is not in it: then the engine ends."""

    def __init__(
        self,
        log: CopyLog,
        pools: Sequence[Tensor],
        host_pools: Sequence[Tensor | None],
        layouts: Sequence[KvCacheLayout],
    ) -> None:
        super().__init__(pools, host_pools, layouts)
        self._log = log

    def onboard(self, group: int, host_ids: Sequence[int], ids: Sequence[int]) -> None:
        super().onboard(group, host_ids, ids)
        self._log.add(BlockCopy(CopyKind.ONBOARD, group, _ints(host_ids), _ints(ids)))

    def offload(self, group: int, ids: Sequence[int], host_ids: Sequence[int]) -> None:
        super().offload(group, ids, host_ids)
        self._log.add(BlockCopy(CopyKind.OFFLOAD, group, _ints(ids), _ints(host_ids)))

    def copy_tokens(
        self, group: int, source: int, target: int, num_tokens: int, *, from_host: bool = False
    ) -> None:
        super().copy_tokens(group, source, target, num_tokens, from_host=from_host)
        self._log.add(
            BlockCopy(
                CopyKind.TOKENS,
                group,
                (int(source),),
                (int(target),),
                num_tokens=int(num_tokens),
                from_host=from_host,
            )
        )

    def move(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        super().move(group, sources, targets)
        self._log.add(BlockCopy(CopyKind.MOVE, group, _ints(sources), _ints(targets)))


def make_copies(copier: BlockCopier, copies: Sequence[BlockCopy]) -> None:
    """Makes `copies`, in order."""
    for one in copies:
        match one.kind:
            case CopyKind.ONBOARD:
                copier.onboard(one.group, one.sources, one.targets)
            case CopyKind.OFFLOAD:
                copier.offload(one.group, one.sources, one.targets)
            case CopyKind.MOVE:
                copier.move(one.group, one.sources, one.targets)
            case CopyKind.TOKENS:
                copier.copy_tokens(
                    one.group,
                    one.sources[0],
                    one.targets[0],
                    one.num_tokens,
                    from_host=one.from_host,
                )


def _ints(ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(map(int, ids))
