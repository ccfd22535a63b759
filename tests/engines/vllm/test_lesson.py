"""The script of ``docs/start/vllm.md`` prints what the page says, in two processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/start/vllm.md").read_text(encoding="utf-8")


def run(folder: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_second_process_loads_what_the_page_says(tmp_path: Path):
    (script,) = re.findall(r"^```python\n# ask.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "ask.py").write_text(script, encoding="utf-8")
    (make_model,) = re.findall(r"^kvconnect (make-model .+)$", PAGE, re.MULTILINE)
    run(tmp_path, "-m", "kvconnect", *make_model.split())
    answers = [run(tmp_path, "ask.py") for _ in range(2)]
    expected = re.findall(r"^\d+ of \d+ prompt tokens were cached$", PAGE, re.MULTILINE)
    assert [answer.splitlines()[-1] for answer in answers] == expected
    first, second = (re.search(r"^answer .+$", answer, re.MULTILINE) for answer in answers)
    assert first is not None
    assert second is not None
    assert first[0] == second[0]
