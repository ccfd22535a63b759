"""The loads from the tiers: each piece from the first tier that has it, checked and promoted."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kvconnect import frame
from kvconnect.backend import StoredBlock
from kvconnect.backends.guard.pieces import load_pieces
from kvconnect.backends.tiered.tier import Tier
from kvconnect.errors import BadFrame
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey
from kvconnect.trace import count, warn_once

if TYPE_CHECKING:
    from torch import Tensor


async def load(
    tiers: Sequence[Tier],
    keys: Sequence[BlockKey],
    into: Sequence[Tensor],
    *,
    promotes: bool,
    dropped: Collection[BlockKey] = (),
) -> int:
    """Fills `into` from `tiers`, in order; see `TieredBackend.load`. Runs on the event loop.

    With `promotes`, blocks loaded from a slower tier are copied to the faster ones, except those
    `dropped`, to which the caller adds what is deleted meanwhile.
    """
    before, loaded = -1, 0
    promotions: list[asyncio.Task[None]] = []
    bad: set[BlockKey] = set()
    try:
        while before < loaded < len(keys):
            before = loaded
            # A slow tier is tried last, so that blocks in another tier need not wait for it.
            for tier in sorted(tiers, key=lambda tier: not tier.prompt):
                rest = slice(loaded, None)
                got = await _load(tier, keys[rest], into[rest], bad)
                if not got:
                    continue
                count(f"store.tiered.loaded.{tier.name}", blocks=got)
                piece = slice(loaded, loaded + got)
                faster = [one for one in tiers[: tiers.index(tier)] if one.alive]
                if faster and promotes:
                    copying = _promote(tier, faster, keys[piece], into[piece], dropped)
                    promotions.append(asyncio.create_task(copying))
                loaded += got
                if loaded == len(keys):
                    break
    finally:
        # They read `into`, which the caller reuses afterwards. Their failure is not the load's.
        for error in await asyncio.gather(*promotions, return_exceptions=True):
            if error is not None:
                warn_once("tiered.promotion", f"loaded blocks were not copied: {error!r}")
        for _ in bad:  # once, however many tiers had a bad copy
            count("store.bad_frame")
    return loaded


async def _promote(
    source: Tier,
    faster: Sequence[Tier],
    keys: Sequence[BlockKey],
    frames: Sequence[Tensor],
    dropped: Collection[BlockKey],
) -> None:
    """Adds loaded blocks to the backlogs of `faster`; `frames` may be reused when this returns.

    A block that a shared `source` no longer describes is left out if its blocks can have ends of
    their own. An instance of ``nixl`` describes no blocks of its peers; these are copied without.
    """
    known = await source.answer(source.guard.describe(keys), [None] * len(keys))
    can = source.guard.capabilities
    blocks = []
    for key, data, entry in zip(keys, frames, known, strict=True):
        if entry is not None:
            blocks.append(entry.block(data[: entry.nbytes]))
        elif can.shared and can.expires_each:
            continue  # its time is over, or its end is not known now
        elif not can.variable_length:
            blocks.append(StoredBlock(key, data))
        else:
            with suppress(BadFrame):  # no frame: the length of the value is unknown
                blocks.append(StoredBlock(key, frame.whole(data)))
    # `dropped` is checked as a backlog takes a block; `Backlog.forget` handles later deletions.
    await asyncio.gather(
        *(tier.backlog.add(one for one in blocks if one.key not in dropped) for tier in faster)
    )


async def _load(
    tier: Tier, keys: Sequence[BlockKey], into: Sequence[Tensor], bad: set[BlockKey]
) -> int:
    """Fills `into`; returns how many leading buffers are filled, and sound if that is checked.

    Returns 0 if the store fails. Keys of damaged frames are added to `bad`.

    Raises:
        BackendTimeout: `into` belongs to the call until `pending` is done.
    """
    if not tier.alive:
        return 0
    taken = [FrameChecksum(data) for data in into] if tier.verify_frames else []
    return await load_pieces(
        into,
        lambda part: tier.answer(
            tier.guard.load_hashed(keys[part], into[part], taken[part]), 0, holds_buffers=True
        ),
        lambda got: _check(tier, keys[got], into[got], taken[got], bad),
    )


async def _check(
    tier: Tier,
    keys: Sequence[BlockKey],
    frames: Sequence[Tensor],
    taken: Sequence[FrameChecksum],
    told: set[BlockKey],
) -> int:
    if not taken:
        return len(keys)
    faults = await tier.framing.open(keys, frames, frames, taken)
    # Sound frames in an unknown encoding are passed on to the readers.
    bad = {index: error for index, error in faults.items() if isinstance(error, BadFrame)}
    if not bad:
        return len(keys)
    for index, error in bad.items():
        told.add(keys[index])
        count(f"store.tiered.bad_frame.{tier.name}")
        warn_once(
            f"{tier.name}.bad_frame",
            f"tier {tier.name}: block {keys[index].hex()[:16]} is bad ({error}); it is dropped",
        )
    await tier.answer(tier.guard.delete([keys[index] for index in bad]), None)
    return min(bad)
