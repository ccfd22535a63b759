"""Who carries out the copies that the block manager orders."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from kvconnect.kernels.copy import copy_tokens
from kvconnect.layout import KvCacheLayout

__all__ = ["BlockCopier", "TensorCopier"]


class BlockCopier(Protocol):
    """Copies between blocks, in the order in which they are asked for.

    Whatever is computed with the target afterwards must see the copy; on CUDA that means the stream
    that is current when the method is called.
    """

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first `num_tokens` tokens of primary block `source` to primary block `target`.

        All layers, keys and values. What the target holds beyond them is not specified.
        """


class TensorCopier:
    """Copies within a pool ``[num_blocks, num_layers, kv_factor, elements]``, CPU or CUDA."""

    def __init__(self, pool: Tensor, layout: KvCacheLayout) -> None:
        self._pool = pool
        self._layout = layout

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        """See `BlockCopier`. On CUDA it runs on the current stream and does not wait."""
        copy_tokens(self._pool, self._layout, source, target, num_tokens)
