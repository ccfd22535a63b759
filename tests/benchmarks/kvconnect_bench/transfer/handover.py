"""Measures prompts from a prefill engine to a decode engine: the exposed transfer time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvconnect.bench.report import Figure
from kvconnect.bench.workload import random_prompt
from kvconnect_bench.blocks.party import Party
from kvconnect_bench.transfer.plan import TransferPlan
from kvconnect_bench.transfer.pulls import PullPair, turns

_MODULE = "kvconnect_bench.transfer.engine_party"
_WARM_UPS = 3


@dataclass(frozen=True, slots=True)
class Handover:
    """The measurements of one transport; times are in seconds, one for each request.

    Attributes:
        exposed: from when the prefill had computed the prompt's last chunk until all of it was
            valid at the decode.
        first: from the same moment until the decode's first token.
        step: of a decode step.
        two_layers: of a pull of two layers of the prompt, between processes that do nothing else.
        idle_prefill, idle_decode: the share of a core that each of the two connected engines takes
            while neither has anything to do.
    """

    exposed: Sequence[float]
    first: Sequence[float]
    step: Sequence[float]
    two_layers: Sequence[float]
    idle_prefill: float
    idle_decode: float


def hand_over(model: Path, transport: str, plan: TransferPlan) -> Handover:
    """Measures prompts that one engine computes while another reads and answers them. Blocks.

    Each engine has half of the cores. Both get a prompt at the same time, as from a router that
    chooses the transfer's id.

    Raises:
        PartyFailed: an engine ended, or a prompt was computed instead of transferred.
    """
    seconds: dict[str, list[float]] = {"exposed": [], "first": [], "step": []}
    with Party(None, _MODULE) as prefill, Party(None, _MODULE) as decode:
        settings = {"model": str(model), "transport": transport}
        settings_of_both = settings | {"prompt_tokens": plan.prompt_tokens}
        sizes = prefill.ask("start", role="prefill", **settings_of_both)
        decode.ask("start", role="decode", **settings_of_both)
        first = random_prompt(plan.prompt_tokens, seed=0).tolist()
        carried = prefill.ask("prefill", prompt=first)["carried"]
        decode.ask("submit", prompt=first, carried=carried)
        decode.ask("answer")
        for number in range(1, 1 + _WARM_UPS + plan.requests):
            prompt = random_prompt(plan.prompt_tokens, seed=number).tolist()
            name = {"transfer_id": f"bench-{number}"}
            decode.ask("submit", prompt=prompt, carried=name | {"address": carried["address"]})
            computed = prefill.ask("prefill", prompt=prompt, **name)["computed"]
            told = decode.ask("answer")
            if number > _WARM_UPS:
                seconds["exposed"].append(told["valid"] - computed)
                seconds["first"].append(told["first"] - computed)
                seconds["step"].append(told["step"])
        idle = _idle_shares((prefill, decode), plan.idle_s)
    two_layers = _two_layers(transport, sizes, plan)
    return Handover(**seconds, two_layers=two_layers, idle_prefill=idle[0], idle_decode=idle[1])


def _idle_shares(parties: Sequence[Party], idle_s: float) -> list[float]:
    began = time.monotonic()
    before = [float(party.ask("cpu_seconds")) for party in parties]
    time.sleep(idle_s)
    after = [float(party.ask("cpu_seconds")) for party in parties]
    passed = time.monotonic() - began
    return [(end - begin) / passed for begin, end in zip(before, after, strict=True)]


def _two_layers(transport: str, sizes: Mapping[str, int], plan: TransferPlan) -> list[float]:
    pieces = -(-plan.prompt_tokens // sizes["tokens_per_block"])
    nbytes = 2 * sizes["layer_nbytes"]
    with PullPair.started(2 * pieces * nbytes) as pair:
        pair.open(transport)
        pair.check(lambda: pair.pull(transport, pieces, nbytes), pieces, nbytes)
        one = turns({"": lambda: pair.pull(transport, pieces, nbytes)}, 3 * plan.rounds)
    return one[""]


def figures_of(transport: str, found: Handover) -> list[Figure]:
    """Returns the figures of `found`."""
    exposed, first, step, two_layers = (
        1e3 * statistics.median(one)
        for one in (found.exposed, found.first, found.step, found.two_layers)
    )
    name = f"handover, {transport}"
    return [
        Figure(f"{name}: two layers", two_layers, "ms"),
        Figure(f"{name}: exposed transfer", exposed, "ms", f"<= {two_layers + 2:.3f}"),
        Figure(f"{name}: decode step", step, "ms"),
        Figure(
            f"{name}: first token after the last chunk", first, "ms", f"<= {exposed + step + 5:.3f}"
        ),
        Figure(f"{name}: idle prefill", 100 * found.idle_prefill, "% of a core", "< 2"),
        Figure(f"{name}: idle decode", 100 * found.idle_decode, "% of a core", "< 2"),
    ]
