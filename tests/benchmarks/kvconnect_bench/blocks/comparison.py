"""The figures: the parties' side by side, and how kvconnect's own cost grows in time and memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import log2

from kvconnect.bench.report import Figure, median_ratio
from kvconnect_bench.blocks.party import Party
from kvconnect_bench.blocks.peers import OWN, Field
from kvconnect_bench.blocks.plan import BlocksPlan

Tell = Callable[[str], None]
"""Receives a sentence about what is being measured."""

Rounds = dict[str, list[float]]
"""What was measured in each round, by party."""


def compare(field: Field, plan: BlocksPlan, tell: Tell) -> list[Figure]:
    """Measures the times of all parties, and how many times longer each peer takes than kvconnect.

    Blocks for minutes. The parties take turns within each round; ratios are taken in a round.

    Raises:
        PartyFailed: a party's process ended.
    """
    long = {"tokens": plan.tokens, "repeats": plan.repeats}
    cached = _rounds(field, plan, "cached", long, tell)
    fresh = _rounds(field, plan, "fresh", long, tell)
    mixed = _rounds(field, plan, "mixed", plan.mixed, tell)
    return [
        *_times("cached prompt", cached),
        *_ratios("cached prompt", cached, {"vLLM": ">= 30"}),
        *_times("fresh prompt", fresh),
        *_ratios("fresh prompt", fresh, {"vLLM": ">= 20"}),
        *_rates("mixed", mixed, plan.requests),
        *_ratios("mixed", mixed, {"vLLM": ">= 2", "SGLang": ">= 2"}),
        *_keys(field, plan, tell),
    ]


def _rounds(
    field: Field, plan: BlocksPlan, workload: str, arguments: Mapping[str, int], tell: Tell
) -> Rounds:
    found: Rounds = {name: [] for name in field.parties}
    for number in range(plan.rounds):
        tell(f"{workload}, round {number + 1} of {plan.rounds}")
        for name, party in field.parties.items():
            answer = party.ask(workload, **arguments)
            seconds = statistics.median(answer) if isinstance(answer, list) else answer
            found[name].append(seconds)
    return found


def _times(title: str, rounds: Rounds) -> list[Figure]:
    return [
        Figure(f"{title}: {name}", statistics.median(seconds) * 1e3, "ms")
        for name, seconds in rounds.items()
    ]


def _rates(title: str, rounds: Rounds, requests: int) -> list[Figure]:
    return [
        Figure(f"{title}: {name}", requests / statistics.median(seconds), "requests/s")
        for name, seconds in rounds.items()
    ]


def _ratios(title: str, rounds: Rounds, targets: Mapping[str, str]) -> list[Figure]:
    figures = []
    for name, seconds in rounds.items():
        if name == OWN:
            continue
        target = "" if "hashing" in name else targets.get(name.partition(" ")[0], "")
        ratio = median_ratio(seconds, rounds[OWN])
        figures.append(Figure(f"{title}: {name} / {OWN}", ratio, "x", target))
    return figures


def _keys(field: Field, plan: BlocksPlan, tell: Tell) -> list[Figure]:
    tell("block keys")
    arguments = {"tokens": plan.tokens, "repeats": plan.rounds}
    own = field.parties[OWN].ask("keys", **arguments)
    figures = [
        Figure("block key", statistics.median(own["first"]) * 1e6, "us", "<= 1"),
        Figure("block key, asked again", statistics.median(own["again"]) * 1e6, "us"),
        Figure("block key, first looked for", statistics.median(own["by_key"]) * 1e6, "us"),
    ]
    for name in field.names("vLLM"):
        if "hashing" in name:
            seconds = field.parties[name].ask("keys", **arguments)["first"]
            figures.append(Figure(f"block key: {name}", statistics.median(seconds) * 1e6, "us"))
    return figures


def growth(own: Party, plan: BlocksPlan, tell: Tell) -> list[Figure]:
    """Measures a request's time by its tokens and by the cached blocks. Blocks for a minute."""
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
    """Measures bookkeeping bytes per cached block, with and without keys. Blocks for seconds."""
    figures = []
    for keys in (False, True):
        name = "memory beyond tokens and keys" if keys else "memory beyond tokens"
        tell(name)
        # Earlier work of a process shows in its resident memory, so each measurement has its own.
        with Party(None, "kvconnect_bench.blocks.ours") as party:
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
    """Returns the most percent that the time grows by when the size doubles."""
    points = list(zip(sizes, seconds, strict=True))
    return max(
        100 * (2 ** (log2(later / time) / log2(larger / size)) - 1)
        for (size, time), (larger, later) in pairwise(points)
    )
