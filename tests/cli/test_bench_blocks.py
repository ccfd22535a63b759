"""``kvconnect bench blocks``: what it prints, and what it says of peers that are not there."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from kvconnect_bench.blocks.peers import OWN, open_field

TINY = ("--tokens", 256, "--requests", 20, "--cached-blocks", 1000, "--rounds", 1)

# What the adapters of the peers call, and nothing more: each block is found again for ever.
VLLM = {
    "vllm/version.py": "__version__ = '9.9'",
    "vllm/sampling_params.py": "class SamplingParams:\n    def __init__(self, max_tokens): pass",
    "vllm/utils/hashing.py": "def sha256(value): return b''",
    "vllm/v1/kv_cache_interface.py": """\
class FullAttentionSpec:
    def __init__(self, **fields): pass
class KVCacheGroupSpec:
    def __init__(self, names, spec): pass
class KVCacheConfig:
    def __init__(self, **fields): pass
""",
    "vllm/v1/request.py": """\
class Request:
    def __init__(self, *, request_id, prompt_token_ids, block_hasher, **fields):
        self.request_id, self.num_tokens = request_id, len(prompt_token_ids)
        self.block_hashes = [] if block_hasher is None else block_hasher(self)
""",
    "vllm/v1/core/kv_cache_utils.py": """\
def init_none_hash(function): pass
def get_request_block_hasher(size, function):
    return lambda request: [b''] * (request.num_tokens // size)
""",
    "vllm/v1/core/kv_cache_manager.py": """\
class KVCacheManager:
    def __init__(self, config, **fields): print('vLLM likes to talk')
    def get_computed_blocks(self, request):
        assert len(request.block_hashes) == request.num_tokens // 16
        return 'blocks', 16, 0
    def allocate_slots(self, request, fresh, matched, blocks): return 'slots'
    def get_block_ids(self, request_id): return ([],)
    def free(self, request): pass
""",
    "torch.py": "float16 = 'float16'",
}


def installed(folder: Path, files: dict[str, str]) -> Path:
    """An interpreter that has these modules, and nothing of kvconnect's but NumPy."""
    for name, source in files.items():
        path = folder / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    numpy = Path(pytest.importorskip("numpy").__file__).parents[1]
    (folder / "numpy").mkdir(parents=True)
    for path in numpy.glob("numpy*"):
        (folder / "numpy" / path.name).symlink_to(path)
    python = folder / "python"
    where = f"{folder}/site:{folder}/numpy"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={where} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python


@pytest.mark.slow
def test_without_interpreters_kvconnect_is_alone_and_the_peers_are_left_out():
    before = set(psutil.Process().children())
    with open_field([]) as field:
        assert list(field.parties) == [OWN]
        assert "vLLM is left out (no --peer-python was given)." in field.left_out
        assert "SGLang is left out (no --peer-python was given)." in field.left_out
    assert set(psutil.Process().children()) <= before, "no party is left running"


@pytest.mark.slow
def test_a_peer_is_measured_beside_kvconnect_with_its_version(bench, tmp_path: Path):
    before = set(psutil.Process().children())
    python = installed(tmp_path, VLLM)
    found, err = bench("blocks", *TINY, "--peer-python", python)
    assert set(psutil.Process().children()) <= before, "no party is left running"
    assert {
        "cached prompt: kvconnect",
        "fresh prompt: kvconnect",
        "mixed: kvconnect",
        "block key",
        "cached prompt, tokens doubled: at most",
        "shared request, 1,000 blocks cached",
        "fresh request, 1,000 blocks cached",
        "alike request, 1,000 blocks cached",
        "memory beyond tokens, resident",
        "memory beyond tokens and keys, asked for",
    } <= found.keys()
    assert all(isinstance(figure["value"], float) for figure in found.values())
    for title in ("cached prompt", "fresh prompt", "mixed"):
        peer = found[f"{title}: vLLM 9.9"]
        ratio = found[f"{title}: vLLM 9.9 / kvconnect"]
        assert peer["value"] > 0
        assert ratio["target"].startswith(">= ")
        assert f"{title}: vLLM 9.9 with hashing" in found
        assert found[f"{title}: vLLM 9.9 with hashing / kvconnect"]["target"] == ""
    assert "block key: vLLM 9.9 with hashing" in found
    assert "SGLang is left out" in err
    assert "No module named 'sglang'" in err
    assert "vLLM is left out" not in err


@pytest.mark.slow  # of another benchmark: test_bench_engine.py
def test_a_peer_that_fails_ends_the_benchmark_with_its_own_words(
    kvconnect, tmp_path: Path, monkeypatch
):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    broken = VLLM | {
        "vllm/v1/core/kv_cache_manager.py": VLLM["vllm/v1/core/kv_cache_manager.py"].replace(
            "return 'slots'", "raise RuntimeError('out of luck')"
        )
    }
    python = installed(tmp_path, broken)
    code, out, err = kvconnect("bench", "blocks", *TINY, "--peer-python", python)
    assert (code, out) == (1, "")
    assert "out of luck" in err
