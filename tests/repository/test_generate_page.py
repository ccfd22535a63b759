"""docs/generate.md: its code runs, its command lines too, and its table is that of the code."""

from __future__ import annotations

import contextlib
import re
import runpy
import shlex
from pathlib import Path

import pytest

from kvconnect import SamplingParams
from kvconnect.cli.main import main
from kvconnect.engine.checkpoint.random_model import make_model

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs/generate.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(page: str, tmp_path_factory) -> Path:
    """Where the blocks run: with a model, and the file that is shown."""
    directory = tmp_path_factory.mktemp("page")
    make_model(directory / "model", "llama")
    (lines,) = [code for language, code in BLOCK.findall(page) if language == "json"]
    (directory / "prompts.jsonl").write_text(lines, encoding="utf-8")
    return directory


def test_every_python_block_runs_after_those_before_it(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    found = [code for language, code in BLOCK.findall(page) if language == "python"]
    assert len(found) >= 5
    (folder / "page.py").write_text("\n".join(found), encoding="utf-8")
    runpy.run_path(str(folder / "page.py"), run_name="__main__")


def test_every_command_line_runs(page, folder, capsys):
    (code,) = [code for language, code in BLOCK.findall(page) if language == "sh"]
    with contextlib.chdir(folder):
        assert [main(shlex.split(line)[1:]) for line in code.splitlines()] == [0, 0]


def test_the_table_has_every_parameter_and_its_default(page):
    rows = re.findall(r"^\| `(\w+)` \| \**`?([\w.-]+)", page, re.MULTILINE)
    defaults = {name: field.default for name, field in SamplingParams.model_fields.items()}
    assert [name for name, _ in rows] == [name for name, _ in rows if name in defaults]
    assert {name for name, _ in rows} == set(defaults)
    for name, shown in rows:
        default = defaults[name]
        assert shown == ("none" if default == () else f"{default}".removesuffix(".0"))
