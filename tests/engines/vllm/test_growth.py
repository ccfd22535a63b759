"""Thousands of requests: nothing is kept of one that ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

from vllm_engine import connector
from vllm_growth import Look

pytestmark = pytest.mark.engines

HERE = Path(__file__).parent
REQUESTS = 5_000
CAPACITY = 24 << 20
"""Of the store below: less than what is saved."""
MARGIN = 16 << 20
"""Bytes: 6.5 KB for each request between the looks that are compared. Ours has more threads, whose
heaps fill in steps; a state that is kept is counted, and this is for what only the system sees."""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_thousands_of_requests_do_not_make_it_grow(llama, tmp_path):
    """Resident memory grows as without a connector, and no more; all else not at all."""
    url = f"disk://{tmp_path}/store?capacity={CAPACITY}"
    plain = looked_at(llama, None, tmp_path)
    own = looked_at(llama, connector(url, staging_bytes=16 << 20), tmp_path)
    early, late = own[4], own[-1]
    assert late.instances == early.instances
    assert late.entries <= early.entries, own
    assert late.descriptors <= early.descriptors, own
    assert late.threads <= early.threads, own
    assert grown(own) <= grown(plain) + MARGIN, (own, plain)
    assert max(one.stored for one in own) <= CAPACITY
    assert late.saved > 2 * CAPACITY
    assert late.saved > early.saved
    assert late.instances
    assert late.entries
    assert not plain[-1].instances


def grown(looks: list[Look]) -> int:
    return max(one.resident for one in looks[5:]) - looks[4].resident


def looked_at(model: Path, transfer: dict[str, Any] | None, directory: Path) -> list[Look]:
    """An engine in a process of its own, whose resident memory says what is in use.

    Left alone, oneDNN keeps code for a thousand shapes, and each thread's heap what was freed.
    """
    job = {
        "model": str(model),
        "transfer": transfer,
        "requests": REQUESTS,
        "directory": str(directory / "store"),
    }
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8",
        "MALLOC_ARENA_MAX": "2",
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
    return [Look(**one) for one in json.loads(done.stdout.splitlines()[-1])]
