"""Saves blocks to a store that may have some of them, for ``import`` and ``prefetch``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvconnect.backend import Backend, StoredBlock
from kvconnect.errors import ConfigurationError, RetryLater
from kvconnect.operations.result import Result

__all__ = ["Saved", "save_missing"]


@dataclass(slots=True)
class Saved(Result):
    """The result of a verb that saves: the blocks, bytes and tokens are those that it saved.

    Attributes:
        present: blocks that were there already.
        bad: blocks left out because they are damaged in the source.
        expired: blocks left out because their own time is over.
    """

    present: int = 0
    bad: int = 0
    expired: int = 0


async def save_missing(store: Backend, batch: Sequence[StoredBlock], done: Saved) -> None:
    """Saves the blocks of `batch` that `store` does not have, and counts them in `done`.

    After an interruption it returns once the running call to the store has ended.

    Raises:
        ConfigurationError: a block is too long for the store.
        BackendUnavailable: the store fails.
        RetryLater: the store accepts no more blocks; those saved before are counted.
    """
    if not batch:
        return
    limit = store.capabilities.max_value_bytes
    if limit is not None and (long := max(block.data.numel() for block in batch)) > limit:
        raise ConfigurationError(
            f"the store takes values of up to {limit} bytes, and a block has {long}; give another"
        )
    known = await store.describe([block.key for block in batch])
    left = [block for block, entry in zip(batch, known, strict=True) if entry is None]
    done.present += len(batch) - len(left)
    now, absent = time.time(), len(left)
    left = [one for one in left if one.expires_at is None or one.expires_at > now]
    done.expired += absent - len(left)
    while left:
        saving = asyncio.ensure_future(store.save(left))
        try:
            # The save continues after Ctrl-C: closing the store would wait for it anyway.
            await asyncio.wait({saving})
        finally:
            stored = await saving
            done.blocks += stored
            done.bytes += sum(block.data.numel() for block in left[:stored])
            done.tokens += sum(_tokens(block) for block in left[:stored])
        if not stored:
            raise RetryLater("the store takes no more blocks; give it more room, and repeat this")
        left = left[stored:]


def _tokens(block: StoredBlock) -> int:
    return 0 if block.group or block.tokens is None else len(block.tokens)
