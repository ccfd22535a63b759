"""The parties' figures side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from kvconnect.bench.blocks.peers import OWN, Field
from kvconnect.bench.blocks.plan import BlocksPlan
from kvconnect.bench.report import Figure

__all__ = ["Tell", "compare"]

Tell = Callable[[str], None]
"""Hears what is being measured."""

Rounds = dict[str, list[float]]
"""What was measured in each round, by party."""


def compare(field: Field, plan: BlocksPlan, tell: Tell) -> list[Figure]:
    """Times of all parties, and how many times longer each peer takes than kvconnect.

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
        ratio = statistics.median(
            theirs / ours for theirs, ours in zip(seconds, rounds[OWN], strict=True)
        )
        target = "" if "hashing" in name else targets.get(name.partition(" ")[0], "")
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
