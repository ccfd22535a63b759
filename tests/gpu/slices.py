"""The measurements that need a GPU, in slices of at most nine minutes each.

A GPU may be at hand for half an hour only. So each slice is one command
(``python tests/gpu/run.py N --out FOLDER``). Its steps stand in the order of their worth, each has
a limit of its own, and what a step measured is written before the next one begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["SLICES", "Need", "Step"]

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


def _sanitized(tool: str, *tests: str, limit_s: int) -> Step:
    return Step(
        f"compute-sanitizer {tool}",
        (*PYTEST, *ON_DEVICE, "tests/kernels/test_gpu.py", *tests),
        limit_s,
        needs="compute-sanitizer",
        program=("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
    )


SLICES: dict[int, tuple[Step, ...]] = {
    1: (
        Step(
            "device kernels",
            (*PYTEST, *ON_DEVICE, "tests/kernels/test_gpu.py"),
            limit_s=180,
        ),
        Step(
            "copies between device and host tiers",
            (*PYTEST, *ON_DEVICE, "tests/cache"),
            limit_s=60,
        ),
        _sanitized("memcheck", "-k", "not large and not many", limit_s=120),
        _sanitized("racecheck", "-k", "gather or append", limit_s=90),
        _sanitized("initcheck", "-k", "gather", limit_s=60),
    ),
    2: (
        Step(
            "bench kernels",
            ("-m", "kvconnect", "bench", "kernels", "--json"),
            limit_s=150,
            scaled=(
                "-m",
                "kvconnect",
                "bench",
                "kernels",
                "--json",
                "--total",
                "32MiB",
                "--repeats",
                "3",
            ),
        ),
        Step(
            "engine against generate()", (*PYTEST, *BOTH, "tests/gpu/test_engine.py"), limit_s=150
        ),
        Step(
            "bench restart",
            ("-m", "kvconnect", "bench", "restart", "--json"),
            limit_s=120,
            scaled=(
                *("-m", "kvconnect", "bench", "restart", "--json"),
                *("--prompt-tokens", "512", "--repeats", "1", "--steps", "20"),
            ),
        ),
        Step(
            "bench engine",
            ("-m", "kvconnect", "bench", "engine", "--json", "--repeats", "3"),
            limit_s=90,
            scaled=(
                *("-m", "kvconnect", "bench", "engine", "--json", "--repeats", "1"),
                *("--requests", "4", "--max-tokens", "8", "--prefill-tokens", "512"),
            ),
        ),
    ),
    3: (
        Step(
            "both transports from and into device memory",
            (*PYTEST, *ON_DEVICE, "tests/transfer/test_device_memory.py"),
            limit_s=120,
        ),
        Step("P and D on one device", (*PYTEST, *BOTH, "tests/gpu/test_transfer.py"), limit_s=180),
        Step(
            "bench transfer",
            ("-m", "kvconnect", "bench", "transfer", "--json"),
            limit_s=200,
            needs="cuda",
        ),
    ),
    4: (
        Step("PromptCache", (*PYTEST, *BOTH, "tests/gpu/test_prompt_cache.py"), limit_s=240),
        Step(
            "the library on this Python and this torch",
            (*PYTEST, "-m", "not slow and not clients", "tests/cache", "tests/vocabulary", "-x"),
            limit_s=240,
        ),
    ),
}
