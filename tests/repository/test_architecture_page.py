"""docs/architecture.md names files, classes and methods that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SOURCES = ("kvconnect", "backends", "kernels")


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs/architecture.md").read_text(encoding="utf-8")


def test_every_file_that_it_names_is_there(repository: Path, page: str):
    named = set(re.findall(r"`((?:kvconnect|backends|kernels|docs|tests)/[\w./*]+)`", page))
    assert len(named) > 30
    assert not [name for name in named if not list(repository.glob(name))]


def test_every_method_that_it_names_is_there(repository: Path, page: str):
    text = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in SOURCES
        for path in (repository / folder).rglob("*.py")
    )
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)`", page))
    assert len(named) > 10
    for cls, method in named:
        body = re.search(rf"^class {cls}\b.*?(?=^class |\Z)", text, re.MULTILINE | re.DOTALL)
        assert body is not None, cls
        assert re.search(rf"^    (async )?def {method}\b", body[0], re.MULTILINE), (cls, method)
