"""Runs one slice of the measurements on a GPU and writes down what each step gave as it goes.

Usage: ``python tests/gpu/run.py SLICE --out FOLDER [--wheels FOLDER] [--minutes 9]``, from the root
of a checkout. Nothing is installed into the environment; what it lacks comes from ``--wheels``, a
folder that ``wheels.py`` filled elsewhere. ``FOLDER/slice-N.json`` is replaced after every step, so
a machine that is taken away in the middle leaves what was measured until then. ``tables.py`` turns
these files into the tables of docs/benchmarks.md. Steps that need what is missing here are skipped
by name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from slices import SLICES, Step

ROOT = Path(__file__).resolve().parents[2]
TAIL = 4000
"""Characters of a step's output that are kept."""


class Results:
    """What a slice gave so far, in a file that is whole at any time."""

    def __init__(self, path: Path, head: Mapping[str, object]) -> None:
        self._path = path
        self._steps: list[dict[str, object]] = []
        self._head = dict(head)
        self._write()

    def add(self, step: dict[str, object]) -> None:
        """Adds what a step gave and replaces the file."""
        self._steps.append(step)
        self._write()

    def _write(self) -> None:
        text = json.dumps({**self._head, "steps": self._steps}, indent=1)
        beside = self._path.with_suffix(".part")
        beside.write_text(text)
        beside.replace(self._path)


def missing(step: Step, has_cuda: bool) -> str | None:
    """Returns why `step` cannot run here, or ``None``."""
    if step.needs in {"cuda", "compute-sanitizer"} and not has_cuda:
        return "no CUDA device"
    if step.needs == "compute-sanitizer" and shutil.which("compute-sanitizer") is None:
        return "no compute-sanitizer on PATH"
    if step.needs == "nixl" and importlib.util.find_spec("nixl") is None:
        return "no nixl"
    return None


def run_step(
    step: Step, env: Mapping[str, str], limit_s: float, has_cuda: bool
) -> dict[str, object]:
    """Runs one step, at most `limit_s` seconds, and returns what it gave."""
    command = step.command if has_cuda or step.scaled is None else step.scaled
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        is_pytest = "pytest" in command
        argv = [*step.program, sys.executable, *command]
        if is_pytest:
            argv.append(f"--junitxml={report}")
        began = time.monotonic()
        with (Path(scratch) / "output").open("w+") as output:
            process = subprocess.Popen(
                argv, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
            try:
                code: int | str = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = f"ended after {limit_s:.0f} s"
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
            output.seek(0)
            text = output.read()
        gave: dict[str, object] = {
            "step": step.name,
            "command": " ".join([*step.program, "python", *command]),
            "exit": code,
            "seconds": round(time.monotonic() - began, 1),
            "figures": list(figures_in(text)),
            "output": text[-TAIL:],
        }
        if is_pytest:
            gave["tests"] = tests_in(report)
    return gave


def figures_in(text: str) -> Iterator[dict[str, Any]]:
    """Yields the JSON objects that benchmarks print, a line each."""
    for line in text.splitlines():
        if line.startswith('{"benchmark"'):
            with suppress(json.JSONDecodeError):
                yield json.loads(line)


def tests_in(report: Path) -> dict[str, object]:
    """Returns counts, names of what failed, and why tests were skipped, from pytest's report."""
    try:
        suite = next(ET.parse(report).getroot().iter("testsuite"))
    except (OSError, ET.ParseError, StopIteration):
        return {}
    cases = list(suite.iter("testcase"))
    bad = [
        case for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skips = [case.find("skipped") for case in cases]
    return {
        "ran": len(cases),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in bad],
        "skipped": sum(skip is not None for skip in skips),
        "why skipped": sorted({skip.get("message", "") for skip in skips if skip is not None}),
    }


def environment(stack: ExitStack, wheels: Path | None) -> dict[str, str]:
    """Returns what steps run with: this checkout's packages, and those of `wheels`."""
    path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvconnect-gpu-")))
    # Not the root: transformers takes a folder `kernels` on the path for a package of that name.
    (path / "kvconnect").symlink_to(ROOT / "kvconnect")
    places = [str(path)]
    if wheels is not None:
        site = path / "site"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps"]
        found = sorted(map(str, wheels.glob("*.whl")))
        subprocess.run([*command, "--target", str(site), *found], check=True)
        places.append(str(site))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def head(number: int, has_cuda: bool) -> dict[str, object]:
    """Returns what the figures were measured with."""
    import torch

    return {
        "slice": number,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if has_cuda else "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def main() -> int:
    """Runs the slice; 0 if no step failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("slice", type=int, choices=sorted(SLICES))
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="what wheels.py downloaded")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="of the whole slice (default: 9)"
    )
    given = parser.parse_args()
    until = time.monotonic() + given.minutes * 60
    given.out.mkdir(parents=True, exist_ok=True)
    import torch

    has_cuda = torch.cuda.is_available()
    good = True
    with ExitStack() as stack:
        env = environment(stack, given.wheels)
        results = Results(given.out / f"slice-{given.slice}.json", head(given.slice, has_cuda))
        for step in SLICES[given.slice]:
            left = until - time.monotonic()
            why = missing(step, has_cuda) or ("no time left" if left < 10 else None)
            if why is not None:
                results.add({"step": step.name, "skipped": why})
                print(f"SKIPPED  {step.name}: {why}", flush=True)
                continue
            gave = run_step(step, env, min(step.limit_s, left), has_cuda)
            results.add(gave)
            # 5: pytest found no test, where all are for a device and marked out.
            fine = gave["exit"] in {0, 5}
            good &= fine
            print(f"{'ok' if fine else 'FAILED':8} {step.name}: {gave['seconds']} s", flush=True)
            if not fine:
                print(gave["output"], flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
