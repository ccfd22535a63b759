"""Draft models with a KV cache of their own, and stages of a pipeline, in a real engine."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import inside
from draft_heads import add_mtp, write_eagle, write_eagle3, write_ernie_mtp
from state_models import STATE_BLOCK, write_qwen3_next
from vllm_engine import BLOCK, Engine, connector, engine, prompts_of

pytestmark = pytest.mark.engines

PROMPTS = prompts_of(400, 200, 40)


def num_drafted(made) -> float:
    """The tokens that the engine drafted since its start."""
    metrics = made.llm.get_metrics()
    return sum(one.value for one in metrics if one.name == "vllm:spec_decode_num_draft_tokens")


def served(model: Path, store: str, *, dtype: str = "float32", **options: Any) -> Iterator[Engine]:
    """An engine on an empty store, then one on what it saved; both answer as without a store."""
    with engine(model, None, dtype=dtype) as plain:
        wanted = plain.tokens(PROMPTS)
    for cached in ([0, 0, 0], [12 * BLOCK, 6 * BLOCK, BLOCK]):
        with engine(model, connector(store), dtype=dtype, **options) as made:
            made.check(PROMPTS, wanted, cached)
            yield made
            made.flush()


def test_draft_layers_are_cached_with_the_others(make_vllm_model, store):
    model, draft = make_vllm_model(), make_vllm_model(seed=1, num_layers=2)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    assert len(list(served(model, store, speculative_config=speculative))) == 2


def num_stored_layers(made) -> int:
    """The layers whose keys and values the connector stores."""
    return sum(layout.num_layers for layout in made.connector._args.layouts)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_heads_are_cached_with_their_model(method, make_vllm_model, store, tmp_path):
    """Their layer's keys and values are in frames beside the model's."""
    model, layer = make_vllm_model(), make_vllm_model(seed=1, num_layers=1)
    write = write_eagle if method == "eagle" else write_eagle3
    head = write(tmp_path / "head", layer)
    speculative = {"method": method, "model": str(head), "num_speculative_tokens": 2}
    for made in served(model, store, speculative_config=speculative):
        assert num_drafted(made) > 0
        assert num_stored_layers(made) == 3 + 1


def test_drafts_from_the_prompt_have_no_layers(make_vllm_model, store):
    """Engines with `ngram` drafts and engines without share what is stored."""
    model = make_vllm_model()
    prompts = [prompts_of(30)[0] * 5]
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with engine(model, connector(store)) as plain:
        wanted = plain.tokens(prompts)
        plain.flush()
    with engine(model, connector(store), speculative_config=speculative) as made:
        made.check(prompts, wanted, [4 * BLOCK])


def test_mtp_layers_are_cached_with_their_model(store, tmp_path):
    model = write_ernie_mtp(tmp_path / "model")
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    for made in served(model, store, dtype="bfloat16", speculative_config=speculative):
        assert num_drafted(made) > 0
        assert num_stored_layers(made) == 3 + 1


def test_mtp_layers_of_a_hybrid(store, tmp_path):
    """Qwen3-Next drafts with a layer of its own, stored beside attention and states.

    vLLM moves states behind accepted drafts by a kernel of Triton, which its build for CPUs lacks:
    "TypeError: 'function' object is not subscriptable", also without a connector.
    """
    model = add_mtp(write_qwen3_next(tmp_path / "model"), layer=3)
    options = {
        "dtype": "bfloat16",
        "mamba_ssm_cache_dtype": "float32",
        "speculative_config": {"method": "mtp", "num_speculative_tokens": 1},
    }
    prompts = prompts_of(5 * STATE_BLOCK + 7, 40)
    made = Engine(model, None, **options)
    try:
        wanted = made.tokens(prompts)
        assert num_drafted(made) > 0
    except TypeError as error:
        if traceback.extract_tb(error.__traceback__)[-1].name != "run_fused_precopy":
            raise
        pytest.skip("vLLM's kernels that move states at drafts need Triton")
    finally:
        made.close()
    for hits in (False, True):
        with engine(model, connector(store), **options) as cached:
            answers = cached.answer(prompts)
            assert [one.tokens for one in answers] == wanted
            assert [one.cached > 0 for one in answers] == [hits, False]
            cached.flush()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_stages_of_a_pipeline_store_their_layers(make_vllm_model, store, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    model = make_vllm_model(num_layers=4)
    with engine(model, None) as plain:
        wanted = plain.tokens(PROMPTS)
    for cached in ([0, 0, 0], [12 * BLOCK, 6 * BLOCK, BLOCK]):
        with engine(model, connector(store), core_process=True, pipeline_parallel_size=2) as made:
            made.inside(inside.prepare_stage)
            made.check(PROMPTS, wanted, cached)
            made.flush()
