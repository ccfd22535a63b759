"""How kvconnect's own cost grows, in time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import log2

from kvconnect.bench.blocks.comparison import Tell
from kvconnect.bench.blocks.party import Party
from kvconnect.bench.blocks.plan import BlocksPlan
from kvconnect.bench.report import Figure

__all__ = ["growth", "memory"]


def growth(own: Party, plan: BlocksPlan, tell: Tell) -> list[Figure]:
    """Time by tokens of a request, and by blocks that are cached. Blocks for a minute."""
    tell("growth with tokens")
    sizes = plan.prompt_sizes
    figures = []
    for name, seconds in own.ask("by_tokens", sizes=sizes, repeats=5 * plan.rounds).items():
        worst = max(after / before for before, after in pairwise(seconds))
        figures += _by_size(f"{name} prompt of {{:,}} tokens", sizes, seconds)
        figures.append(Figure(f"{name} prompt, tokens doubled: at most", worst, "x", "<= 2"))
    tell("growth with cached blocks")
    sizes = plan.pool_sizes
    answer = own.ask("by_cached_blocks", sizes=sizes, rounds=5 * plan.rounds)
    for name, seconds in answer.items():
        figures += _by_size(f"{name} request, {{:,}} blocks cached", sizes, seconds)
        title = f"{name} request, cached blocks doubled: at most"
        if len(sizes) > 1:
            figures.append(Figure(title, _per_doubling(sizes, seconds), "%", "< 10"))
    return figures


def memory(plan: BlocksPlan, tell: Tell) -> list[Figure]:
    """Bytes of bookkeeping per cached block, with and without keys. Blocks for seconds."""
    figures = []
    for keys in (False, True):
        name = "memory beyond tokens and keys" if keys else "memory beyond tokens"
        tell(name)
        # What a process did before shows in its resident memory: each starts anew.
        with Party(None, "kvconnect.bench.blocks.ours") as party:
            for traced, how in ((False, "resident"), (True, "asked for")):
                taken = party.ask("bookkeeping", **plan.shared_prompts, keys=keys, traced=traced)
                figures.append(Figure(f"{name}, {how}", taken, "B/block", "<= 32"))
    return figures


def _by_size(name: str, sizes: Sequence[int], seconds: Sequence[float]) -> list[Figure]:
    return [
        Figure(name.format(size), time * 1e6, "us")
        for size, time in zip(sizes, seconds, strict=True)
    ]


def _per_doubling(sizes: Sequence[int], seconds: Sequence[float]) -> float:
    """Percent that the time grows by when the size doubles, where it grows fastest."""
    points = list(zip(sizes, seconds, strict=True))
    return max(
        100 * (2 ** (log2(later / time) / log2(larger / size)) - 1)
        for (size, time), (larger, later) in pairwise(points)
    )
