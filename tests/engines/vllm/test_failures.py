"""A store that is damaged, dead, slow or lying costs time: never a token, never the engine."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import inside
from vllm_engine import connector, prompts_of

pytestmark = pytest.mark.engines

PROMPTS = prompts_of(400, 200, 90)
LIMITS = {"lookup_timeout_ms": 200.0, "load_timeout_s": 1.0, "save_timeout_s": 1.0}


def test_fail_ends_the_request_and_nothing_else(start, llama, tmp_path):
    transfer = connector(f"faulty://fail{tmp_path}", KV_LOAD_FAILURE_POLICY="fail", **LIMITS)
    with start(llama, transfer) as made:
        wanted = made.tokens(PROMPTS)
        made.flush()
        made.forget_device()
        made.inside(inside.plant, "fail", "flip")
        reasons = [one.reason for one in made.answer(PROMPTS)]
        assert "error" in reasons
        made.inside(inside.heal, "fail")
        assert made.tokens(PROMPTS) == wanted


def damaged(directory: Path) -> None:
    """Some bytes of every file of blocks are wrong."""
    rng = random.Random(1)
    for path in segments(directory):
        content = bytearray(path.read_bytes())
        for _ in range(200):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)


def truncated(directory: Path) -> None:
    """Every file of blocks ends early."""
    for path in segments(directory):
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 3)


def segments(directory: Path) -> list[Path]:
    found = [path for path in directory.rglob("*") if path.is_file() and "index" not in path.name]
    return [path for path in found if path.stat().st_size > 1 << 20]


@pytest.mark.parametrize("harm", [damaged, truncated])
def test_a_store_that_was_harmed_while_nothing_ran(start, llama, tmp_path, harm):
    url = f"disk://{tmp_path}/store?capacity=64MiB"
    with start(llama, connector(url)) as made:
        wanted = made.tokens(PROMPTS)
    assert segments(tmp_path / "store")
    harm(tmp_path / "store")
    with start(llama, connector(url)) as made:
        assert made.tokens(PROMPTS) == wanted
        made.forget_device()
        assert made.tokens(PROMPTS) == wanted


def test_a_directory_that_goes_while_the_engine_runs(start, llama, tmp_path):
    with start(llama, connector(f"disk://{tmp_path}/store?capacity=64MiB")) as made:
        wanted = made.tokens(PROMPTS)
        made.flush()
        shutil.rmtree(tmp_path / "store")
        for _ in range(2):
            made.forget_device()
            assert made.tokens(PROMPTS) == wanted
        made.check_empty()
