"""The handle of pinned blocks, as a cache manager gives it out."""

from __future__ import annotations

__all__ = ["PinnedBlocks"]


class PinnedBlocks:
    """An opaque handle of blocks that stay until `BaseKVCacheManager.unpin` is given it."""

    __slots__ = ()
