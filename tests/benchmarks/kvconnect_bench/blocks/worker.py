"""A party's process: answers each request, a line of JSON, with a line of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from typing import Any, TextIO

from kvconnect_bench.blocks.traffic import BLOCK, Cache, cached, fresh, mixed

MakeCache = Callable[[int], Cache]
"""Makes an empty cache of so many blocks."""

Workload = Callable[..., object]


def workloads(make: MakeCache) -> dict[str, Workload]:
    """Returns the workloads that every party has, by name. Each run has a new cache."""

    def run_cached(tokens: int, repeats: int) -> list[float]:
        return cached(make(tokens // BLOCK + 1), tokens=tokens, repeats=repeats)

    def run_fresh(tokens: int, repeats: int) -> list[float]:
        return fresh(make(tokens // BLOCK), tokens=tokens, repeats=repeats)

    def run_mixed(blocks: int, **traffic: int) -> float:
        return mixed(make(blocks), **traffic)

    return {"cached": run_cached, "fresh": run_fresh, "mixed": run_mixed}


def methods(party: object) -> dict[str, Workload]:
    """Returns the public methods of `party`, by name: they are the workloads of its process."""
    names = [name for name in vars(type(party)) if not name.startswith("_")]
    return {name: getattr(party, name) for name in names}


def take_stdout() -> TextIO:
    """Reserves standard output for answers: other output of the party goes to standard error.

    Must be called first, because some parties print while they are imported.
    """
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    if isinstance(sys.stdout, TextIOWrapper):
        # Else earlier output would follow the party's last error message.
        sys.stdout.reconfigure(line_buffering=True)
    return answers


def serve(answers: TextIO, versions: Mapping[str, str], served: Mapping[str, Workload]) -> None:
    """Answers requests ``{"workload": name, "arguments": {...}}`` until standard input ends.

    The first line that it writes holds `versions`, those of what the party uses.
    """

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer(dict(versions))
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        answer(served[asked["workload"]](**asked["arguments"]))
