"""A party's process: measures what it is asked for, one line of JSON in, one out."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from typing import Any, TextIO

from kvconnect_bench.blocks.traffic import BLOCK, Cache, cached, fresh, mixed

__all__ = ["MakeCache", "serve", "take_stdout", "workloads"]

MakeCache = Callable[[int], Cache]
"""Makes an empty cache of so many blocks."""

Workload = Callable[..., object]


def workloads(make: MakeCache) -> dict[str, Workload]:
    """What every party can be asked for, by name; each run has a new cache."""

    def run_cached(tokens: int, repeats: int) -> list[float]:
        return cached(make(tokens // BLOCK + 1), tokens=tokens, repeats=repeats)

    def run_fresh(tokens: int, repeats: int) -> list[float]:
        return fresh(make(tokens // BLOCK), tokens=tokens, repeats=repeats)

    def run_mixed(blocks: int, **traffic: int) -> float:
        return mixed(make(blocks), **traffic)

    return {"cached": run_cached, "fresh": run_fresh, "mixed": run_mixed}


def take_stdout() -> TextIO:
    """Standard output for answers alone: whatever else the party prints goes to standard error.

    To be called first of all: some print while they are imported.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if isinstance(sys.stdout, TextIOWrapper):
        # Or what was printed long ago would come after the complaint that it ends with.
        sys.stdout.reconfigure(line_buffering=True)
    return answers


def serve(answers: TextIO, versions: Mapping[str, str], served: Mapping[str, Workload]) -> None:
    """Answer requests ``{"workload": name, "arguments": {...}}`` until standard input ends.

    The first line says who this is: `versions` of what it uses.
    """

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(dict(versions))
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        answer(served[asked["workload"]](**asked["arguments"]))
