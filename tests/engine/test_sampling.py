"""Choosing tokens: greedy, temperature, top-k, top-p, seeds."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from observed import request_of

from kvconnect import SamplingParams
from kvconnect.engine.sampling.sampler import Sampler

LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0, -9.0]])


def draw(params: SamplingParams, count: int = 1, logits: torch.Tensor = LOGITS) -> list[int]:
    request = request_of([1], params)
    sampler = Sampler()
    return [sampler.sample(logits, [request])[0] for _ in range(count)]


def test_zero_temperature_takes_the_best():
    assert draw(SamplingParams(), 5) == [1] * 5


def test_top_k_of_one_takes_the_best():
    assert draw(SamplingParams(temperature=5.0, top_k=1), 5) == [1] * 5


def test_top_k_keeps_the_k_likeliest():
    assert set(draw(SamplingParams(temperature=9.0, top_k=3, seed=1), 200)) == {1, 2, 3}


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert set(draw(SamplingParams(temperature=50.0, top_k=99, seed=1), 300)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_shortest_prefix_that_reaches_it():
    # 0.643, 0.237, 0.087, 0.032, 0.000
    assert set(draw(SamplingParams(temperature=1.0, top_p=0.64, seed=1), 100)) == {1}
    assert set(draw(SamplingParams(temperature=1.0, top_p=0.65, seed=1), 100)) == {1, 3}
    assert set(draw(SamplingParams(temperature=1.0, top_p=0.95, seed=1), 300)) == {1, 2, 3}


def test_samples_follow_the_distribution():
    counts = Counter(draw(SamplingParams(temperature=2.0, seed=3), 4000))
    expected = torch.softmax(LOGITS[0] / 2.0, dim=-1)
    for token, probability in enumerate(expected.tolist()):
        assert abs(counts[token] / 4000 - probability) < 0.03


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e30])
def test_extreme_temperatures_are_no_errors(temperature):
    token = draw(SamplingParams(temperature=temperature, seed=1))[0]
    assert token == 1 or temperature > 1


def test_equal_seeds_equal_samples():
    params = SamplingParams(temperature=1.0, seed=7)
    assert draw(params, 20) == draw(params, 20)
    assert draw(params, 20) != draw(SamplingParams(temperature=1.0, seed=8), 20)


def test_seeds_of_any_size():
    for seed in (-1, 0, 2**63, 2**64, 2**80):
        draw(SamplingParams(temperature=1.0, seed=seed))


def test_a_seed_gives_the_same_whatever_else_is_in_the_batch(llama, open_llm, prompts):
    llm = open_llm(llama, max_num_tokens=32)
    params = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)
    alone = llm.generate(prompts[0], params)[0].output_token_ids
    others = [SamplingParams(max_tokens=9 + i, temperature=2.0) for i in range(len(prompts) - 1)]
    together = llm.generate(prompts, [params, *others])
    assert together[0].output_token_ids == alone


def test_no_seed_gives_different_samples(llama, open_llm, prompts):
    llm = open_llm(llama)
    params = SamplingParams(max_tokens=24, temperature=3.0, ignore_eos=True)
    first, second = llm.generate([prompts[0]] * 2, params)
    assert first.output_token_ids != second.output_token_ids


def test_generators_are_dropped_with_their_requests(llama, open_llm, prompts):
    llm = open_llm(llama)
    llm.generate(prompts, SamplingParams(max_tokens=3, temperature=1.0))
    assert llm._engine._sampler._generators == {}
