"""Runs the parts of ``kvconnect bench transfer``, and says what is left out and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from kvconnect.bench.report import Figure
from kvconnect.bench.workload import bench_model
from kvconnect_bench.transfer.floors import NotAllowed
from kvconnect_bench.transfer.handover import figures_of, hand_over
from kvconnect_bench.transfer.link import LinkRefused
from kvconnect_bench.transfer.plan import TransferPlan
from kvconnect_bench.transfer.pulls import on_link, on_loopback, on_one_host

Tell = Callable[[str], object]


def bench_transfer(
    model: Path | None, scratch: Path, plan: TransferPlan, tell: Tell
) -> list[Figure]:
    """Measures the parts of `plan` that this machine can run. Blocks for a minute or two.

    Args:
        model: directory, for the engines; default: a random Llama of 46 million parameters.
        scratch: an empty directory.
        plan: what and how to measure.
        tell: called with a sentence about each part, and about what is left out.

    Raises:
        PartyFailed: a process ended, or a transport does not work here; says why.
        RuntimeError: other bytes were read than those asked for.
    """
    if "nixl" in plan.transports and find_spec("nixl") is None:
        tell("nixl is not installed: left out (pip install '.[nixl]')")
        plan = replace(plan, transports=tuple(one for one in plan.transports if one != "nixl"))
    figures: list[Figure] = []
    if "host" in plan.parts and "nixl" in plan.transports:
        tell("same host")
        try:
            figures += on_one_host(plan)
        except NotAllowed as refused:
            tell(f"left out: {refused}")
    if "loopback" in plan.parts:
        tell("loopback")
        figures += on_loopback(plan)
    if "link" in plan.parts:
        figures += _on_links(plan, tell)
    if "handover" in plan.parts:
        directory = bench_model(model, scratch)
        for transport in plan.transports:
            tell(f"handover, {transport}")
            figures += figures_of(transport, hand_over(directory, transport, plan))
    return figures


def _on_links(plan: TransferPlan, tell: Tell) -> Sequence[Figure]:
    figures = []
    for gbit in plan.rates_gbit:
        tell(f"link of {gbit:g} Gbit/s")
        try:
            figures += on_link(plan, gbit)
        except LinkRefused as refused:
            tell(f"links are left out: {refused}")
            break
    return figures
