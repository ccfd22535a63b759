"""A model directory that is switched while vLLM's own process loads it: no engine, no keys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import psutil
from vllm_engine import connector, prompts_of

pytestmark = [pytest.mark.engines, pytest.mark.timeout(240)]

_CHILD = Path(__file__).with_name("vllm_child.py")
_WORKER = "VLLM::Worker"


def is_loading(process: subprocess.Popen) -> bool:
    """Whether vLLM's worker is there, which loads the weights."""
    for one in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if any(_WORKER in part for part in one.cmdline()):
                return True
    return False


@pytest.mark.planted("switched-while-loading", "vllm", "refused")
def test_a_model_that_is_switched_while_it_is_loaded_is_refused(make_vllm_model, store, tmp_path):
    (link := tmp_path / "current").symlink_to(make_vllm_model())
    (tmp_path / "next").symlink_to(make_vllm_model(seed=1))
    job = {"model": str(link), "transfer": connector(store), "prompts": prompts_of(100)}
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with subprocess.Popen(
        [sys.executable, _CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
    ) as process:
        try:
            process.stdin.write(json.dumps(job))
            process.stdin.close()
            until = time.monotonic() + 100
            while not is_loading(process):
                assert process.poll() is None
                assert time.monotonic() < until
            (tmp_path / "next").replace(link)
            said = process.stdout.read()
            assert process.wait(60) != 0
        finally:
            process.kill()
    assert f"'{link}' changed after this process had started" in said
