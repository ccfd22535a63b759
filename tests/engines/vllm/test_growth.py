"""Thousands of requests: nothing is kept of one that ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

from vllm_engine import connector
from vllm_growth import Look

pytestmark = pytest.mark.engines

HERE = Path(__file__).parent
REQUESTS = 5_000
CAPACITY = 24 << 20
"""Of the store below: less than what is saved."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_requests_do_not_make_it_grow(llama, tmp_path):
    """An engine in a process of its own; its resident memory is in tests/e2e/test_growth.py."""
    directory = tmp_path / "store"
    job = {
        "model": str(llama),
        "transfer": connector(f"disk://{directory}?capacity={CAPACITY}", staging_bytes=16 << 20),
        "requests": REQUESTS,
        "directory": str(directory),
    }
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "vllm_growth.py")],
        input=json.dumps(job),
        env=environment,
        capture_output=True,
        text=True,
        timeout=420,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    looks = [Look(**one) for one in json.loads(done.stdout.splitlines()[-1])]
    early, late = looks[4], looks[-1]
    assert late.instances == early.instances
    assert late.entries <= early.entries, looks
    assert late.descriptors <= early.descriptors, looks
    assert late.threads <= early.threads, looks
    assert max(one.stored for one in looks) <= CAPACITY
    assert late.saved > 2 * CAPACITY
    assert late.saved > early.saved
    assert late.instances
    assert late.entries
