"""The handle of pinned blocks that a cache manager returns."""

from __future__ import annotations

__all__ = ["PinnedBlocks"]


class PinnedBlocks:
    """An opaque handle of blocks that stay until it is passed to `BaseKVCacheManager.unpin`."""

    __slots__ = ()
