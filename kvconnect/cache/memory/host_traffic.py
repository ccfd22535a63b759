"""What goes to the host tier and comes back, counted."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.cache.memory.copier import TensorCopier
from kvconnect.trace import count

__all__ = ["MeteredCopier"]


class MeteredCopier(TensorCopier):
    """A `TensorCopier` that tells of host traffic: events ``cache.onboard`` and ``cache.offload``.

    Attributes:
        onboarded_tokens: tokens that came from the host in pool group 0, so far.
    """

    onboarded_tokens = 0

    def onboard(self, group: int, host_ids: Sequence[int], ids: Sequence[int]) -> None:
        """See `BlockCopier`."""
        super().onboard(group, host_ids, ids)
        self._count_onboard(group, len(ids), len(ids) * self._layouts[group].tokens_per_block)

    def offload(self, group: int, ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """See `BlockCopier`."""
        super().offload(group, ids, host_ids)
        count("cache.offload", blocks=len(ids))

    def copy_tokens(
        self, group: int, source: int, target: int, num_tokens: int, *, from_host: bool = False
    ) -> None:
        """See `BlockCopier`."""
        super().copy_tokens(group, source, target, num_tokens, from_host=from_host)
        if from_host:
            self._count_onboard(group, 1, num_tokens)

    def _count_onboard(self, group: int, blocks: int, num_tokens: int) -> None:
        count("cache.onboard", blocks=blocks)
        if group == 0:
            self.onboarded_tokens += num_tokens
