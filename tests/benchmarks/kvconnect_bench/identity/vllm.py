"""Measures what watching a model's weights adds to a step of vLLM."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from kvconnect.bench.report import Figure, median_ratio
from kvconnect.bench.workload import random_prompt
from kvconnect_bench.blocks.party import Party, PartyFailed
from kvconnect_bench.engines.plan import OURS
from kvconnect_bench.engines.run import started_engine
from kvconnect_bench.identity.plan import IdentityPlan
from kvconnect_bench.peer_python import require_peer_python
from kvconnect_bench.transfer.pulls import turns

_STEPS = 128


def watch_in_vllm(
    model: Path, scratch: Path, plan: IdentityPlan, tell: Callable[[str], object]
) -> list[Figure]:
    """Times decode steps with and without the watch, by turns, in one engine for each connector.

    The watch checks the weights in the steps that load or save something.

    Raises:
        ConfigurationError: the plan's interpreter does not exist, or this is no checkout.
        RuntimeError: a connector never checked the weights.
    """
    if plan.peer_python is None:
        tell("vllm is left out: give --peer-python, an interpreter that has it")
        return []
    require_peer_python(plan.peer_python)
    figures: list[Figure] = []
    for name in OURS:
        (scratch / name).mkdir()
        longest = plan.prompt_tokens + _STEPS
        try:
            with started_engine(model, scratch / name, name, longest, plan.peer_python) as party:
                figures += _figures(f"vLLM with {name}", party, plan)
        except PartyFailed as failed:
            tell(f"vllm: {name} is left out: {failed}")
    return figures


def _figures(where: str, party: Party, plan: IdentityPlan) -> list[Figure]:
    numbers = count(3)  # smaller seeds are the engine's own
    watched: list[tuple[float, float]] = []

    def step(*, watches: bool) -> float:
        """Returns the median seconds of a decode step behind a new prompt."""
        party.ask("watch", watches=watches)
        prompt = random_prompt(plan.prompt_tokens, next(numbers)).tolist()
        steps: list[list[float]]
        steps = party.ask("answer", prompt=prompt, max_tokens=_STEPS)["steps"]
        party.ask("settle")
        if watches:
            watched.extend((whole, looking) for whole, *_, looking in steps)
        return statistics.median(whole for whole, *_ in steps[10:-5])

    with_watch, without = partial(step, watches=True), partial(step, watches=False)
    step(watches=False)  # does not count
    seconds = turns({"on": with_watch, "off": without, "again": without}, plan.repeats)
    looks = [looking for _, looking in watched if looking]
    if not looks:
        raise RuntimeError(f"{where}: the weights were never looked at")
    on, off, again = seconds.values()
    share = sum(looks) / sum(whole for whole, _ in watched)
    return [
        Figure(f"{where}: decode step", statistics.median(on) * 1e3, "ms"),
        Figure(f"{where}: decode step, watched / not", median_ratio(on, off), "x", "<= 1.05"),
        Figure(f"{where}: decode step, not watched twice", median_ratio(again, off), "x"),
        Figure(f"{where}: one look at the weights", statistics.median(looks) * 1e6, "us"),
        Figure(f"{where}: looks, share of all steps", share * 100, "%", "<= 1"),
    ]
