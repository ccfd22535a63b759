"""Renders a benchmark's figures: as a table for people, as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured number. `target` says what it should be, if there is a target."""

    name: str
    value: float
    unit: str
    target: str = ""


def binary_size(nbytes: int) -> str:
    """Returns a size such as ``"16 KiB"``, rounded down.

    The unit is the largest of MiB, KiB and B that leaves at least 1.
    """
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >> shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def machine() -> str:
    """Describes the machine that the figures were measured on."""
    import torch  # takes seconds, which ``--help`` must not

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores, {device}, {platform.machine()}, torch {torch.__version__}"


def render(title: str, figures: Sequence[Figure], *, as_json: bool = False) -> str:
    """Returns the figures as a table, or as one JSON object."""
    if as_json:
        return as_json_object(title, figures)
    width = max(len(figure.name) for figure in figures)
    lines = [f"{title} ({machine()})"]
    for figure in figures:
        target = f"   target {figure.target}" if figure.target else ""
        lines.append(f"  {figure.name:<{width}}  {figure.value:>12,.3f} {figure.unit:<10}{target}")
    return "\n".join(line.rstrip() for line in lines)


def as_json_object(title: str, figures: Sequence[DataclassInstance]) -> str:
    """Returns the figures, of any kind, as one JSON object."""
    body = [asdict(figure) for figure in figures]
    return json.dumps({"benchmark": title, "machine": machine(), "figures": body})


def median_ratio(some: Sequence[float], floors: Sequence[float]) -> float:
    """Returns the median of the rounds' own ratios: what slows a round down slows both."""
    return statistics.median(one / floor for one, floor in zip(some, floors, strict=True))
