"""The measurements that need a GPU, in slices of at most nine minutes each.

A GPU may be at hand for half an hour only. So each slice is one command
(``python tests/gpu/run.py N --out FOLDER``). Its steps stand in the order of their worth, each has
a limit of its own, and what a step measured is written before the next one begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Need = Literal["cuda", "compute-sanitizer", "nixl", "nothing"]

PYTEST = ("-m", "pytest", "-W", "default", "-q", "-p", "no:cacheprovider")
"""Warnings of other versions than the pinned ones are no errors here."""

ON_DEVICE = ("-m", "gpu")
BOTH = ("-m", "gpu or slow")
"""Tests of `tests/gpu` run on the CPU as long forms: the same code, rehearsed."""


@dataclass(frozen=True, slots=True)
class Step:
    """One command of a slice.

    Attributes:
        name: in the results.
        command: arguments of Python; or of `program`.
        limit_s: is ended after so many seconds.
        needs: is skipped by name where that is missing.
        program: stands before Python.
        scaled: a smaller form of the command, for a machine without a GPU; ``None``: the same.
    """

    name: str
    command: tuple[str, ...]
    limit_s: int
    needs: Need = "nothing"
    program: tuple[str, ...] = ()
    scaled: tuple[str, ...] | None = None


def _tests(name: str, where: str, limit_s: int, marked: tuple[str, ...] = ON_DEVICE) -> Step:
    return Step(name, (*PYTEST, *marked, where), limit_s)


def _sanitized(tool: str, chosen: str, limit_s: int) -> Step:
    return Step(
        f"compute-sanitizer {tool}",
        (*PYTEST, *ON_DEVICE, "tests/kernels/test_gpu.py", "-k", chosen),
        limit_s,
        needs="compute-sanitizer",
        program=("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
    )


def _bench(name: str, limit_s: int, scaled: str | None) -> Step:
    """The benchmark `name`; one without a smaller form needs a GPU."""
    command = ("-m", "kvconnect", "bench", name, "--json")
    return Step(
        f"bench {name}",
        command,
        limit_s,
        needs="nothing" if scaled else "cuda",
        scaled=(*command, *scaled.split()) if scaled else None,
    )


SLICES: dict[int, tuple[Step, ...]] = {
    1: (
        _tests("device kernels", "tests/kernels/test_gpu.py", 180),
        _tests("copies between device and host tiers", "tests/cache", 60),
        _sanitized("memcheck", "not large and not many", 120),
        _sanitized("racecheck", "gather or append", 90),
        _sanitized("initcheck", "gather", 60),
    ),
    2: (
        _bench("kernels", 150, "--total 32MiB --repeats 3"),
        _tests("engine against generate()", "tests/gpu/test_engine.py", 150, BOTH),
        _bench("restart", 120, "--prompt-tokens 512 --repeats 1 --steps 20"),
        _bench("engine", 90, "--repeats 1 --requests 4 --max-tokens 8 --prefill-tokens 512"),
    ),
    3: (
        _tests(
            "both transports from and into device memory",
            "tests/transfer/test_device_memory.py",
            120,
        ),
        _tests("P and D on one device", "tests/gpu/test_transfer.py", 180, BOTH),
        _bench("transfer", 200, None),
    ),
    4: (
        _tests("PromptCache", "tests/gpu/test_prompt_cache.py", 240, BOTH),
        Step(
            "the library on this Python and this torch",
            (*PYTEST, "-m", "not slow and not clients", "tests/cache", "tests/vocabulary", "-x"),
            limit_s=240,
        ),
    ),
}
