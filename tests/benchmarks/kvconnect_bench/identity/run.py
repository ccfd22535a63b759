"""Measures the parts of ``bench identity``, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvconnect.bench.report import Figure
from kvconnect_bench.identity.canary import canary
from kvconnect_bench.identity.plan import IdentityPlan
from kvconnect_bench.identity.vllm import watch_in_vllm
from kvconnect_bench.identity.weights import weights
from kvconnect_bench.transfer.plan import TransferPlan
from kvconnect_bench.transfer.run import bench_transfer


def bench_identity(
    model: Path, scratch: Path, plan: IdentityPlan, tell: Callable[[str], object]
) -> list[Figure]:
    """Returns the figures of those parts that this machine has. Blocks for minutes.

    Args:
        model: directory.
        scratch: a directory for the stores of engines.
        plan: the settings of the run.
        tell: called with the name of each part before it is measured, and with a sentence where
            something is left out.

    Raises:
        ConfigurationError: the plan's interpreter does not exist.
    """
    wire = TransferPlan(parts=("loopback", "link"), transports=("tcp",), rounds=plan.repeats)
    measures: dict[str, Callable[[], list[Figure]]] = {
        "weights": lambda: weights(model, plan),
        "canary": lambda: canary(model, plan),
        "wire": lambda: bench_transfer(model, scratch, wire, tell),
        "vllm": lambda: watch_in_vllm(model, scratch, plan, tell),
    }
    figures: list[Figure] = []
    for name in plan.parts:
        tell(name)
        figures += measures[name]()
    return figures
