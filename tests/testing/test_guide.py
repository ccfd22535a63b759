"""The code of ``docs/how-to/writing-a-backend.md`` does what the page says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how-to/writing-a-backend.md").read_text(encoding="utf-8")
FILES = re.findall(r"```python\n# ([\w.]+)(.*?)\n(.*?)```", PAGE, re.DOTALL)


def python(folder, *arguments):
    path = os.pathsep.join([str(folder), str(ROOT), *sys.path])
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def folder(tmp_path):
    """All files of the page, as they are at its end."""
    for name, _, code in FILES:
        (tmp_path / name).write_text(code, encoding="utf-8")
    return tmp_path


def test_the_first_try_fails_what_the_page_says(folder):
    (first,) = (code for _, note, code in FILES if "first try" in note)
    (folder / "my_store.py").write_text(first, encoding="utf-8")
    said = python(folder, "check.py").stdout
    listed = re.findall(r"^failed +(\S+)", PAGE, re.MULTILINE)
    assert re.findall(r"^failed +(\S+)", said, re.MULTILINE) == listed
    for reason in re.findall(r"^failed +\S+ +(.+)", PAGE, re.MULTILINE):
        assert reason in said


def test_the_second_passes_in_pytest_without_a_failure(folder):
    chosen = "contract or integrity or durable or killed_while_saving or failing"
    ran = python(
        folder,
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "kvconnect.testing.plugin"),
        *("--strict-markers", "test_my_store.py", "-k", chosen),
    )
    assert ran.returncode == 0, ran.stdout
    passed = int(re.search(r"(\d+) passed", ran.stdout)[1])
    assert passed > 40


def test_its_url_makes_it(folder):
    code = (
        "from kvconnect.backends import StoreUrl; from my_store_url import from_url; "
        "print(from_url(StoreUrl.parse('files:/some/where')).folder)"
    )
    assert python(folder, "-c", code).stdout.strip() == "/some/where"
