"""Saves blocks to a store, for ``copy``, and for ``import`` and ``prefetch`` those it lacks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from kvconnect.backend import Backend, StoredBlock
from kvconnect.errors import ConfigurationError, RetryLater
from kvconnect.operations.result import Saved


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
    known = await store.describe([block.key for block in batch])
    left = [block for block, entry in zip(batch, known, strict=True) if entry is None]
    done.present += len(batch) - len(left)
    now, absent = time.time(), len(left)
    left = [one for one in left if one.expires_at is None or one.expires_at > now]
    done.expired += absent - len(left)

    def count(saved: Sequence[StoredBlock]) -> None:
        done.blocks += len(saved)
        done.bytes += sum(block.data.numel() for block in saved)
        done.tokens += sum(
            len(block.tokens) for block in saved if not block.group and block.tokens is not None
        )

    await save_all(store, left, count)


async def save_all(
    store: Backend,
    blocks: Sequence[StoredBlock],
    count: Callable[[Sequence[StoredBlock]], None],
    name: str = "the store",
) -> None:
    """Saves `blocks`, in as many calls as `store` takes, and has those of each call counted.

    After an interruption it returns once the running call to the store has ended. Errors call the
    store by its `name`.

    Raises:
        ConfigurationError: a block is too long for the store; nothing is saved.
        BackendUnavailable: the store fails.
        RetryLater: the store accepts no more blocks; those saved before are counted.
    """
    limit = store.capabilities.max_value_bytes
    longest = max((block.data.numel() for block in blocks), default=0)
    if limit is not None and longest > limit:
        raise ConfigurationError(
            f"{name} takes values of up to {limit} bytes, and a block has {longest}; give another"
        )
    while blocks:
        saving = asyncio.ensure_future(store.save(blocks))
        try:
            # The save continues after Ctrl-C: closing the store would wait for it anyway.
            await asyncio.wait({saving})
        finally:
            stored = await saving
            count(blocks[:stored])
        if not stored:
            raise RetryLater(f"{name} takes no more blocks; give it more room, and repeat this")
        blocks = blocks[stored:]
