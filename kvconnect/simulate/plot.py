"""Draws pictures of a simulation; needs matplotlib, the extra ``plot``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvconnect.errors import ConfigurationError, MissingExtra
from kvconnect.simulate.report import TIERS, Report, Run
from kvconnect.simulate.tally import Counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {"device": "#1b6ca8", "host": "#e08a1e", "external": "#6a994e"}
_SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Checks before the work whether `write_plot` can write to `path`.

    Raises:
        MissingExtra: matplotlib is not installed.
        ConfigurationError: the folder does not exist, or the file's name has another suffix.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtra("--plot", "plot")
    if path.suffix not in _SUFFIXES:
        raise ConfigurationError(f"--plot {path}: must end in {', '.join(_SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigurationError(f"--plot {path}: there is no folder {path.parent}")


def write_plot(report: Report, path: Path) -> None:
    """Draws `report`: one run over time, or a sweep over sizes; call `check_plot` before.

    Raises:
        OSError: the file cannot be written.
    """
    # Without pyplot, so that no window system is needed and no figure is kept.
    from matplotlib.figure import Figure

    title = f"{Path(report.trace).name}: {report.requests_read:,} requests"
    if report.swept is None:
        figure = Figure(figsize=(9, 8), layout="constrained")
        axes = figure.subplots(3, 1, sharex=True)
        _draw_run(report, report.runs[0], list(axes))
    else:
        figure = Figure(figsize=(8, 5), layout="constrained")
        _draw_sweep(report, report.swept, figure.subplots())
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def _draw_run(report: Report, run: Run, axes: list[Axes]) -> None:
    hits, moves, blocks = axes
    rows = run.tally.rows(len(run.tally.buckets))
    minutes = np.array([start for start, _, _ in rows] + [rows[-1][1]]) / 60
    counts = [row for _, _, row in rows]
    base = np.zeros(len(rows))
    for tier in run.tiers:
        top = base + [row.hit_rate(tier) * 100 for row in counts]
        hits.fill_between(
            minutes, _steps(base), _steps(top), step="post", color=_COLOURS[tier], label=tier, lw=0
        )
        base = top
    hits.set(ylabel="prompt tokens found (%)", ylim=(0, 100))
    hits.legend(loc="lower left")
    seconds = run.tally.width
    unit, factor = _unit(report)
    moved = [dict(report.moved_tokens(run, row)) for row in counts]
    for name in moved[0]:
        rates = np.array([tokens[name] for tokens in moved]) * factor / seconds
        moves.step(minutes, _steps(rates), where="post", label=name)
    moves.legend(loc="upper left")
    moves.set(ylabel=f"moved ({unit}/s)", ylim=(0, None))
    evicted = np.array([row.evicted_blocks / seconds for row in counts])
    blocks.step(minutes, _steps(evicted), where="post", color="#a4243b")
    blocks.set(ylabel="evicted (blocks/s)", xlabel="minutes", ylim=(0, None))


def _draw_sweep(report: Report, swept: str, axes: Axes) -> None:
    runs = sorted(report.runs, key=lambda run: run.capacity(swept))
    unit, factor = _unit(report)
    sizes = np.array([run.capacity(swept) for run in runs]) * factor
    totals: list[Counts] = [run.tally.total() for run in runs]
    base = np.zeros(len(runs))
    for tier in TIERS:
        if any(tier in run.tiers for run in runs):
            base = base + [total.hit_rate(tier) * 100 for total in totals]
            axes.plot(sizes, base, marker="o", color=_COLOURS[tier], label=f"up to {tier}")
    if len(set(sizes)) > 1 and sizes[0] > 0 and sizes[-1] / sizes[0] >= 4:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,.4g}" if size < 1e4 else f"{size:,.0f}" for size in sizes])
        axes.minorticks_off()
    axes.set(xlabel=f"{swept} size ({unit})", ylabel="prompt tokens found (%)", ylim=(0, 100))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _unit(report: Report) -> tuple[str, float]:
    """Returns a unit for plots, and how many of it a token is."""
    return ("tokens", 1) if report.token_nbytes is None else ("GiB", report.token_nbytes / 2**30)


def _steps(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Repeats the last value, so that the last step has its width."""
    return np.append(values, values[-1])
