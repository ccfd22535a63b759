"""The checks as a pytest class: ``class TestMine(BackendConformance)``. Needs pytest."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvconnect.testing.check import Check
from kvconnect.testing.checks import all_checks
from kvconnect.testing.runner import run_check
from kvconnect.testing.subject import Subject


class BackendConformance(Subject):
    """A base class with a test for each check: a subclass writes only `make_backend`.

    ::

        class TestMine(BackendConformance):
            def make_backend(self):
                return MyBackend(self.tmp_path / "store")

    Overriding more methods of `Subject` enables more checks. Checks that lack a method are skipped
    and name it.

    Attributes:
        tmp_path: a directory of each test's own, removed after it.
    """

    tmp_path: Path

    @pytest.fixture(autouse=True)
    def _kvconnect_place(self, tmp_path: Path) -> Iterator[None]:
        self.tmp_path = tmp_path
        yield
        # A hundred checks of a store on disk would leave gigabytes.
        shutil.rmtree(tmp_path, ignore_errors=True)


def _method(one: Check) -> Callable[[Any], None]:
    def test(self: BackendConformance) -> None:
        __tracebackhide__ = True
        outcome = run_check(one, self)
        if outcome.result == "skipped":
            pytest.skip(outcome.reason)
        if outcome.error is not None:
            raise outcome.error

    test.__name__ = f"test_{one.group}_{one.name}".replace(" ", "_")
    test.__doc__ = one.demands
    test.__qualname__ = f"BackendConformance.{test.__name__}"
    marked: Callable[[Any], None] = pytest.mark.kvconnect(one.group)(test)
    if one.needs_root:
        marked = pytest.mark.kvconnect_root(marked)
    return marked


for _one in all_checks():
    _test = _method(_one)
    setattr(BackendConformance, _test.__name__, _test)
