"""Draws the time to the first token over the store's rate; needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvconnect_bench.crossover.plan import Cell

_CURVES = {
    "computed": ("#a4243b", "computed, no store"),
    "loaded": ("#1b6ca8", "loaded, computing nothing meanwhile"),
    "ours": ("#6a994e", "both, from both ends"),
}


def write_plot(cells: Sequence[Cell], path: Path) -> None:
    """Draws the cells of one user and the middle prompt; call `check_plot` before.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # without pyplot: no window system is asked for

    alone = [cell for cell in cells if cell.users == 1]
    prompts = sorted({cell.prompt for cell in alone})
    prompt = prompts[len(prompts) // 2]
    latency = min(cell.first_byte_ms for cell in alone)
    row = sorted(
        (cell for cell in alone if (cell.prompt, cell.first_byte_ms) == (prompt, latency)),
        key=lambda cell: cell.rate,
    )
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    rates = [cell.rate for cell in row]
    base = row[0].computed
    for name, (colour, label) in _CURVES.items():
        axes.plot(
            rates, [getattr(cell, name) / base for cell in row], "o-", color=colour, label=label
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.set_yticks([0.125, 0.25, 0.5, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    axes.set(
        xlabel="store's rate / model's rate",
        ylabel="time to first token / computing",
        title=f"a prompt of {prompt:,} tokens that a store holds",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
