"""The code blocks of the README run, one after the other, in an empty folder with a model in it."""

from __future__ import annotations

import contextlib
import re
import runpy
import shlex
from pathlib import Path

import pytest

from kvconnect.cli.main import main

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(repository: Path, language: str) -> list[str]:
    text = (repository / "README.md").read_text(encoding="utf-8")
    return [code for name, code in BLOCK.findall(text) if name == language]


def command_lines(repository: Path) -> list[list[str]]:
    """The lines that call kvconnect, split; benchmarks take minutes and are left out."""
    code = "".join(blocks(repository, "sh")).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in code.splitlines()]
    return [line[1:] for line in lines if line[:1] == ["kvconnect"] and line[1] != "bench"]


@pytest.fixture(scope="module")
def folder(repository: Path, tmp_path_factory) -> Path:
    """Where the blocks run, after the command lines; what one leaves there the next one finds."""
    directory = tmp_path_factory.mktemp("readme")
    with contextlib.chdir(directory):
        codes = {shlex.join(line): main(line) for line in command_lines(repository)}
    assert codes
    assert set(codes.values()) == {0}, codes
    return directory


def test_the_command_lines_begin_with_making_a_model(repository: Path):
    first, *others = command_lines(repository)
    assert first == ["make-model", "model"]
    assert len(others) >= 2


def test_every_python_block_runs(repository: Path, folder: Path, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    found = blocks(repository, "python")
    assert len(found) >= 4
    for number, code in enumerate(found):
        # A block that begins with a file name is saved under it, so that the next can import it.
        named = re.match(r"# (\w+\.py)\n", code)
        file = folder / (named[1] if named else f"block_{number}.py")
        file.write_text(code, encoding="utf-8")
        runpy.run_path(str(file), run_name=file.stem if named else "__main__")


def test_the_blocks_are_those_that_the_tests_know_how_to_run(repository: Path):
    languages = {name for name, _ in BLOCK.findall((repository / "README.md").read_text("utf-8"))}
    assert languages <= {"python", "sh", "text"}


def test_the_make_targets_it_names_exist(repository: Path):
    targets = set(re.findall(r"^([\w-]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z][\w-]*)`?", (repository / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets
