"""``kvconnect bench engine``: kvconnect alone, and with vLLM's engine taking turns."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
from test_bench_blocks import installed

TINY = ("--requests", 2, "--prompt-tokens", 4, "--max-tokens", 3, "--prefill-tokens", 9)

# What the adapter calls, and nothing more; every answer is the token 7.
VLLM = {
    "vllm/version.py": "__version__ = '9.9'",
    "vllm/__init__.py": """\
from types import SimpleNamespace as Some
class SamplingParams:
    def __init__(self, *, max_tokens, temperature, ignore_eos):
        assert (temperature, ignore_eos) == (0, True)
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, *, model, dtype, max_model_len, enable_prefix_caching, disable_log_stats):
        assert (dtype, max_model_len, enable_prefix_caching) == ('float32', 10, False)
        print('vLLM likes to talk')
    def generate(self, asked, params, *, use_tqdm):
        assert all(set(one) == {'prompt_token_ids'} for one in asked)
        return [Some(outputs=[Some(token_ids=[7] * params.max_tokens)]) for _ in asked]
""",
}


def test_kvconnect_alone(bench, model: Path):
    found, _ = bench("engine", "--model", model, *TINY, "--repeats", 1)
    assert list(found) == ["one request", "2 requests at once", "prefill of 9 tokens", "ratio"]
    assert all(figure["value"] > 0 for figure in found.values())


def test_beside_vllm(bench, model: Path, tmp_path: Path):
    before = set(psutil.Process().children())
    python = installed(tmp_path, VLLM)
    found, _ = bench("engine", "--model", model, *TINY, "--repeats", 2, "--peer-python", python)
    assert set(psutil.Process().children()) <= before, "no party is left running"
    for title in ("one request", "2 requests at once", "prefill of 9 tokens"):
        assert found[f"{title}: vLLM 9.9"]["value"] > 0
        assert found[f"{title}: kvconnect / vLLM 9.9"]["target"] == ">= 0.95"
    assert 0 <= found["answers equal to vLLM 9.9's"]["value"] < 100


def test_an_interpreter_without_vllm_ends_it_with_its_words(kvconnect, model: Path):
    options = ("--model", model, *TINY, "--peer-python", sys.executable)
    code, out, err = kvconnect("bench", "engine", *options)
    assert (code, out) == (1, "")
    assert "No module named 'vllm'" in err
