"""What a tiered store promises, from what its tiers do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvconnect.backend import Capabilities
from kvconnect.backends.tiered.tier import Tier

__all__ = ["capabilities_of", "decisive"]


def capabilities_of(own: Capabilities, tiers: Sequence[Tier]) -> Capabilities:
    """Returns `own`, as far as it holds whichever of `tiers` a block is in, or comes from."""
    every = [tier.guard.capabilities for tier in tiers]
    deciding = [tier.guard.capabilities for tier in decisive(tiers)]
    limits = [one.max_value_bytes for one in deciding]
    bounded = [limit for limit in limits if limit is not None]
    return replace(
        own,
        enumerable=all(one.enumerable for one in every),
        inline=all(one.inline for one in every),
        expires=all(one.expires for one in every),
        variable_length=all(one.variable_length for one in every),
        durable=all(one.durable for one in deciding),
        shared=all(one.shared for one in deciding),
        max_value_bytes=max(bounded) if len(bounded) == len(limits) else None,
        checks_frames=own.checks_frames and all(tier.verify_frames for tier in tiers),
    )


def decisive(tiers: Sequence[Tier]) -> list[Tier]:
    """Returns the tiers that decide whether a save was one: they keep what the whole promises."""
    through = [tier for tier in tiers if tier.write == "through"]
    tests: tuple[Callable[[Capabilities], bool], ...] = (
        lambda can: can.durable and can.shared,
        lambda can: can.durable,
        lambda can: can.shared,
    )
    for test in tests:
        keeping = [tier for tier in through if test(tier.guard.capabilities)]
        if keeping:
            return keeping
    return through
