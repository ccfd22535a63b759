"""Makes blocks whose content is derived from their key, and buffers that reveal writes to them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvconnect import frame
from kvconnect.backend import StoredBlock
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

_CANARY = 0xC5
_MARGIN = 4096


class BlockMaker:
    """Makes keys, blocks and buffers.

    A block's bytes are derived from its key, so any process can check them.

    Args:
        seed: the random seed; keys of different seeds differ.

    Attributes:
        layout: the layout of the blocks that `block` makes, unless it is given their size.
        frame_nbytes: the bytes of those blocks.
        named: every key that was made.
    """

    layout = KvCacheLayout(2, 2, 16, 16, 16, torch.float32)
    frame_nbytes = frame.frame_nbytes(layout.block_nbytes)

    def __init__(self, seed: object = 0) -> None:
        self.seed = seed
        self.named: set[BlockKey] = set()

    def key(self, *parts: object) -> BlockKey:
        """Returns the key of the name `parts`."""
        name = repr((self.seed, *parts)).encode()
        key = BlockKey(hashlib.blake2b(name, digest_size=32).digest())
        self.named.add(key)
        return key

    def keys(self, *parts: object, count: int) -> list[BlockKey]:
        """Returns `count` keys."""
        return [self.key(*parts, number) for number in range(count)]

    @staticmethod
    def content(key: BlockKey, nbytes: int) -> Tensor:
        """Returns the content of the block of `key` if it is `nbytes` long."""
        whole = np.frombuffer(key * (nbytes // len(key) + 1), np.uint8)[:nbytes]
        return torch.from_numpy(whole.copy())

    @staticmethod
    def buffer(nbytes: int, *, shift: int = 0) -> Tensor:
        """Returns `nbytes` of canary bytes, surrounded by others; page-aligned, plus `shift`."""
        whole = torch.full((nbytes + 3 * _MARGIN,), _CANARY, dtype=torch.uint8)
        start = _MARGIN + -(whole.data_ptr() + _MARGIN) % _MARGIN + shift
        return whole[start : start + nbytes]

    @staticmethod
    def untouched(buffer: Tensor) -> bool:
        """Returns whether `buffer` still holds only canaries."""
        return bool((buffer == _CANARY).all())

    @staticmethod
    def margins_whole(buffer: Tensor) -> bool:
        """Returns whether the memory around `buffer` is unchanged."""
        whole = torch.tensor([], dtype=torch.uint8).set_(buffer.untyped_storage())
        start, end = buffer.storage_offset(), buffer.storage_offset() + buffer.numel()
        return bool((whole[:start] == _CANARY).all() and (whole[end:] == _CANARY).all())

    def buffers(self, count: int, nbytes: int | None = None) -> list[Tensor]:
        """Returns `count` buffers of `nbytes`, by default of a frame's length."""
        return [self.buffer(self.frame_nbytes if nbytes is None else nbytes) for _ in range(count)]

    def block(
        self,
        key: BlockKey,
        parent: BlockKey | None = None,
        *,
        nbytes: int | None = None,
        shift: int = 0,
        tokens: Sequence[int] | None = None,
        priority: int = 35,
    ) -> StoredBlock:
        """Makes a block with the `content` of its key, by default as the payload of a frame."""
        if nbytes is None:
            data = self.buffer(self.frame_nbytes, shift=shift)
            payload = frame.payload(data, self.layout.block_nbytes)
        else:
            data = payload = self.buffer(nbytes, shift=shift)
        payload.copy_(self.content(key, payload.numel()))
        array = None if tokens is None else np.asarray(tokens, np.int32)
        return StoredBlock(key, data, parent, array, priority)

    def chain(
        self,
        keys: Sequence[BlockKey],
        *,
        after: BlockKey | None = None,
        nbytes: int | None = None,
        tokens: Sequence[int] | None = None,
        priority: int = 35,
    ) -> list[StoredBlock]:
        """Makes blocks of `keys`, each the parent of the next, the first one below `after`."""
        parents = [after, *keys]
        return [
            self.block(key, parent, nbytes=nbytes, tokens=tokens, priority=priority)
            for key, parent in zip(keys, parents, strict=False)
        ]

    def holds(self, buffer: Tensor, key: BlockKey, *, framed: bool = True) -> bool:
        """Returns whether `buffer` holds the block of `key`, and no margin was written to."""
        data = frame.payload(buffer, self.layout.block_nbytes) if framed else buffer
        return self.margins_whole(buffer) and torch.equal(data, self.content(key, data.numel()))
