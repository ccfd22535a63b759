"""Draft models with a KV cache of their own, and stages of a pipeline, in a real engine."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import inside
from vllm_engine import BLOCK, connector, engine, prompts_of

pytestmark = pytest.mark.engines

PROMPTS = prompts_of(400, 200, 40)


def test_draft_layers_are_cached_with_the_others(make_vllm_model, store):
    model, draft = make_vllm_model(), make_vllm_model(seed=1, num_layers=2)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    with engine(model, None) as plain:
        wanted = plain.tokens(PROMPTS)
    for cached in ([0, 0, 0], [12 * BLOCK, 6 * BLOCK, BLOCK]):
        with engine(model, connector(store), speculative_config=speculative) as made:
            answers = made.answer(PROMPTS)
            assert [one.tokens for one in answers] == wanted
            assert [one.cached for one in answers] == cached
            made.flush()


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
            answers = made.answer(PROMPTS)
            assert [one.tokens for one in answers] == wanted
            assert [one.cached for one in answers] == cached
            made.flush()
