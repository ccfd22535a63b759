"""A copier that moves nothing and counts the blocks that it would move."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CountingCopier"]


class CountingCopier:
    """A `BlockCopier` that only counts, and only blocks of group 0: no states.

    Attributes:
        onboarded: blocks copied from host to device.
        offloaded: blocks copied from device to host.
        host_tokens: tokens copied out of a host block into a device block, for a partial match.
        device_tokens: tokens copied between device blocks, for a partial match.
    """

    def __init__(self) -> None:
        self.onboarded = 0
        self.offloaded = 0
        self.host_tokens = 0
        self.device_tokens = 0

    def onboard(self, group: int, host_ids: Sequence[int], ids: Sequence[int]) -> None:
        """Implements `BlockCopier`."""
        self.onboarded += 0 if group else len(ids)

    def offload(self, group: int, ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Implements `BlockCopier`."""
        self.offloaded += 0 if group else len(ids)

    def copy_tokens(
        self, group: int, source: int, target: int, num_tokens: int, *, from_host: bool = False
    ) -> None:
        """Implements `BlockCopier`."""
        if from_host:
            self.host_tokens += num_tokens
        else:
            self.device_tokens += num_tokens

    def move(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Implements `BlockCopier`; moves between slabs are not counted."""
