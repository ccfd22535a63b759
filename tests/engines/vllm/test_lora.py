"""Adapters on a real engine: what is computed with one is loaded for that one only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import safetensors.torch
import torch
from vllm.lora.request import LoRARequest
from vllm_engine import SIZE, connector, engine, prompts_of

pytestmark = pytest.mark.engines

PROMPTS = prompts_of(500, 320)
WHOLE = [480, 320]
NOTHING = [0, 0]
OPTIONS = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2, "max_lora_rank": 8}
RANK = 8


def make_adapter(directory: Path, seed: int) -> Path:
    """A random adapter of queries, keys and values, in the format of PEFT; not a faint one."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(seed)
    hidden = SIZE["hidden_size"]
    key_value = hidden // SIZE["num_heads"] * SIZE["num_kv_heads"]
    weights = {}
    for layer in range(SIZE["num_layers"]):
        for name, width in {"q_proj": hidden, "k_proj": key_value, "v_proj": key_value}.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = torch.randn(RANK, hidden, generator=generator)
            weights[f"{module}.lora_B.weight"] = torch.randn(width, RANK, generator=generator)
    weights = {name: one * 0.3 for name, one in weights.items()}
    safetensors.torch.save_file(weights, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return make_adapter(root / "first", 1), make_adapter(root / "second", 2)


def request(number: int, directory: Path) -> LoRARequest:
    return LoRARequest(directory.name, number, str(directory))


def test_two_adapters_and_none_share_nothing(llama, adapters, store):
    first, second = (request(n, one) for n, one in enumerate(adapters, 1))
    with engine(llama, None, **OPTIONS) as plain:
        wanted = []
        for lora in (first, second, None):
            wanted.append(plain.tokens(PROMPTS, lora=lora))
            plain.forget_device()
    assert len({str(one) for one in wanted}) == 3
    with engine(llama, connector(store)) as base:
        assert base.tokens(PROMPTS) == wanted[2]
    with engine(llama, connector(store), **OPTIONS) as made:
        for lora, tokens in zip((first, second), wanted, strict=False):
            made.check(PROMPTS, tokens, NOTHING, lora=lora)
            made.flush()
            made.forget_device()
        for lora, tokens in zip((first, second), wanted, strict=False):
            made.check(PROMPTS, tokens, WHOLE, lora=lora)
            made.forget_device()
        made.check([PROMPTS[0]] * 2, [wanted[1][0], wanted[0][0]], [480] * 2, lora=[second, first])
        made.forget_device()
        assert made.tokens(PROMPTS) == wanted[2]
    with engine(llama, connector(store)) as base:
        base.check(PROMPTS, wanted[2], WHOLE)


@pytest.mark.planted("no-adapter", "vllm", "equal")
def test_what_cannot_be_told_from_an_adapters_is_not_kept(llama, adapters, store):
    """Kernels of vLLM on the CPU compute requests without an adapter with one of their batch."""
    first, second = (request(n, one) for n, one in enumerate(adapters, 1))
    with engine(llama, None) as plain:
        wanted = plain.tokens(PROMPTS)
    with engine(llama, connector(store), **OPTIONS) as made:
        for prompt in PROMPTS:
            made.answer([prompt] * 3, lora=[None, first, second])
    with engine(llama, connector(store)) as base:
        assert base.tokens(PROMPTS) == wanted


def test_salts_of_one_adapter_are_apart(llama, adapters, store):
    lora = request(1, adapters[0])
    with engine(llama, connector(store), **OPTIONS) as made:
        wanted = made.tokens(PROMPTS, lora=lora, salt="one")
        made.flush()
        found = {}
        for salt in ("two", None, "one"):
            made.forget_device()
            answers = made.answer(PROMPTS, lora=lora, salt=salt)
            assert [one.tokens for one in answers] == wanted
            found[salt] = [one.cached for one in answers]
            made.flush()
        made.forget_device()
        assert [one.cached for one in made.answer(PROMPTS, salt="one")] == NOTHING
    assert found == {"two": NOTHING, None: NOTHING, "one": WHOLE}


def test_modules_that_an_engine_leaves_out_are_in_the_keys(llama, adapters, store):
    lora = request(1, adapters[0])
    with engine(llama, connector(store), **OPTIONS) as made:
        wanted = made.tokens(PROMPTS, lora=lora)
        made.flush()
    with engine(llama, connector(store), lora_target_modules=["o_proj"], **OPTIONS) as made:
        answers = made.answer(PROMPTS, lora=lora)
    assert [one.cached for one in answers] == NOTHING
    assert [one.tokens for one in answers] != wanted


@pytest.mark.planted("adapter-weights-changed", "vllm", "refused")
def test_an_adapter_that_changed_after_it_was_loaded_is_not_cached(
    llama, adapters, store, tmp_path
):
    """`vllm serve` loads adapters before a request names them."""
    directory = shutil.copytree(adapters[0], tmp_path / "adapter")
    with engine(llama, connector(store), **OPTIONS) as made:
        made.llm.llm_engine.add_lora(request(1, directory))
        shutil.copy(adapters[1] / "adapter_model.safetensors", directory)
        for lora in (*[request(1, directory)] * 2, request(2, adapters[1])):
            assert [one.cached for one in made.answer(PROMPTS, lora=lora)] == NOTHING
            made.flush()
            made.forget_device()
