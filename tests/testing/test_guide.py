"""The code of ``docs/how-to/writing-a-backend.md`` does what the page says."""

from __future__ import annotations

import re
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvconnect.backends import StoreUrl
from kvconnect.testing import check_backend

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/writing-a-backend.md").read_text(encoding="utf-8")
FILES = re.findall(r"```python\n# ([\w.]+)(.*?)\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """All files of the page, as they are at its end; they can be imported."""
    for name, _, code in FILES:
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, _, _ in FILES:
        sys.modules.pop(Path(name).stem, None)


def test_the_first_try_fails_what_the_page_says(folder, capsys):
    (first,) = (code for _, note, code in FILES if "first try" in note)
    (folder / "my_store.py").write_text(first, encoding="utf-8")
    runpy.run_path("check.py")
    said = capsys.readouterr().out
    listed = re.findall(r"^failed +(\S+)", PAGE, re.MULTILINE)
    assert re.findall(r"^failed +(\S+)", said, re.MULTILINE) == listed
    for reason in re.findall(r"^failed +\S+ +(.+)", PAGE, re.MULTILINE):
        assert reason in said


def test_the_second_passes_without_a_failure(folder):
    subject = import_module("test_my_store").TestFileStore()
    subject.directory = folder / "blocks"  # as its fixture does
    report = check_backend(
        subject,
        only=[
            *("contract", "integrity", "capabilities.durable", "crash.killed_while_saving"),
            *("resources.failing_read", "resources.failing_write", "resources.failing_open"),
        ],
    )
    report.raise_on_failure()
    assert len(report.of("passed")) > 40


def test_its_url_makes_it(folder):
    store = import_module("my_store_url").from_url(StoreUrl.parse("files:/some/where"))
    assert str(store.folder) == "/some/where"
