"""Turns what ``run.py`` wrote into the tables of docs/benchmarks.md.

Usage: ``python tests/gpu/tables.py FOLDER``; prints Markdown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def rows(step: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of one step."""
    if "skipped" in step:
        yield f"| {step['step']} | not run: {step['skipped']} | |"
        return
    tests = step.get("tests") or {}
    if tests:
        failed = len(tests["failed"])
        passed = tests["ran"] - failed - tests["skipped"]
        result = f"{passed} passed, {failed} failed, {tests['skipped']} skipped"
    else:
        result = "done" if step["exit"] == 0 else f"failed ({step['exit']})"
    yield f"| {step['step']} | {result} | {step['seconds']} s |"


def figures(step: Mapping[str, Any]) -> Iterator[str]:
    """Yields a table for each benchmark of a step."""
    for benchmark in step.get("figures", ()):
        yield ""
        command = step["command"].replace("python -m kvconnect", "kvconnect")
        yield f"`{command}`: {benchmark['benchmark']}"
        yield ""
        yield "| figure | measured | target |"
        yield "|---|---|---|"
        for one in benchmark["figures"]:
            measured = f"{one['value']:,.3f} {one['unit']}"
            yield f"| {one['name']} | {measured} | {one['target']} |"


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields the Markdown of one slice."""
    yield (
        f"Slice {found['slice']}, {found['date'][:10]}, {found['device']}, torch {found['torch']}, "
        f"Python {found['python']}, {found['cores']} cores:"
    )
    yield ""
    yield "| step | result | took |"
    yield "|---|---|---|"
    for step in found["steps"]:
        yield from rows(step)
    for step in found["steps"]:
        yield from figures(step)
    yield ""


def main() -> int:
    """Prints the tables of all slices of the folder."""
    if len(sys.argv) != 2 or sys.argv[1] in {"-h", "--help"}:
        print(__doc__)
        return 2
    for path in sorted(Path(sys.argv[1]).glob("slice-*.json")):
        print("\n".join(table(json.loads(path.read_text()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
