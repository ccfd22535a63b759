"""The code blocks of the README run, one after the other, in an empty folder with a model in it."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from kvconnect.cli.main import main
from kvconnect.engine.random_model import make_model

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the blocks run; what one leaves there the next one finds, as for a reader."""
    directory = tmp_path_factory.mktemp("readme")
    make_model(directory / "model", "llama", max_position_embeddings=4096)
    return directory


def blocks(repository: Path, language: str) -> list[str]:
    text = (repository / "README.md").read_text(encoding="utf-8")
    return [code for name, code in BLOCK.findall(text) if name == language]


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


def test_every_command_line_runs(repository: Path, folder: Path, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    lines = [
        line
        for code in blocks(repository, "sh")
        for line in code.replace("\\\n", " ").splitlines()
        if line.startswith("kvconnect ") and not line.startswith("kvconnect bench")
    ]
    assert len(lines) >= 2
    for line in lines:
        assert main(shlex.split(line, comments=True)[1:]) == 0, capsys.readouterr().err


def test_the_blocks_are_those_that_the_tests_know_how_to_run(repository: Path):
    languages = {name for name, _ in BLOCK.findall((repository / "README.md").read_text("utf-8"))}
    assert languages <= {"python", "sh", "text"}


def test_the_make_targets_it_names_exist(repository: Path):
    targets = set(re.findall(r"^([\w-]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"`?make ([a-z][\w-]*)`?", (repository / "README.md").read_text()))
    assert {"demo", "test"} <= named <= targets | {"sure"}
    assert "kvconnect.cli.main" in sys.modules
