"""Penalties and the least length: what transformers' own generate() does with them."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
import torch
from observed import request_of
from transformers import AutoModelForCausalLM

from kvconnect import SamplingParams
from kvconnect.engine.sampling.sampler import Sampler
from kvconnect.errors import ConfigurationError

PROMPT = list(b"the same again, the same again, the same")
LENGTH = 30


@pytest.fixture(scope="module")
def model(llama):
    return AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64)


def generate(model, **settings):
    """What transformers answers to `PROMPT`."""
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=LENGTH, **settings)
    return tuple(out[0, len(PROMPT) :].tolist())


def next_logits(model, generated):
    with torch.no_grad():
        return model(torch.tensor([PROMPT + generated])).logits[0, -1].float()


def having(params, prompt, generated=()):
    request = request_of(prompt, params)
    request.append_tokens(np.array(generated, np.int32))
    return request


def sample(logits, request, eos=()):
    return Sampler(eos).sample(torch.tensor([logits]), [request])[0]


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_a_repetition_penalty_is_that_of_transformers(llm, model, penalty):
    expected = generate(model, do_sample=False, repetition_penalty=penalty)
    params = SamplingParams(max_tokens=LENGTH, repetition_penalty=penalty)
    assert llm.generate(PROMPT, params)[0].output_token_ids == expected
    assert expected != generate(model, do_sample=False)


@pytest.mark.parametrize(
    ("presence", "frequency"), [(1.5, 0.0), (0.0, 1.2), (-2.0, 0.0), (0.7, -0.4)]
)
def test_presence_and_frequency_count_what_was_generated(llm, model, presence, frequency):
    expected = []
    for _ in range(LENGTH):
        logits = next_logits(model, expected)
        for token, count in Counter(expected).items():
            logits[token] -= presence + frequency * count
        expected.append(int(logits.argmax()))
    params = SamplingParams(
        max_tokens=LENGTH,
        ignore_eos=True,
        presence_penalty=presence,
        frequency_penalty=frequency,
    )
    assert list(llm.generate(PROMPT, params)[0].output_token_ids) == expected


def test_a_prompt_counts_for_repetition_only():
    logits = [1.0, 0.9]
    for params in (SamplingParams(presence_penalty=2), SamplingParams(frequency_penalty=2)):
        assert sample(logits, having(params, [0, 0])) == 0
        assert sample(logits, having(params, [1], [0])) == 1
    assert sample(logits, having(SamplingParams(repetition_penalty=2), [0])) == 1


def test_a_repetition_penalty_lowers_negative_logits_too():
    assert sample([-1.0, -1.5], having(SamplingParams(repetition_penalty=2), [0])) == 1


def test_a_repetition_counts_once():
    params = SamplingParams(repetition_penalty=2)
    assert sample([4.0, 1.5], having(params, [0, 0, 0], [0, 0])) == 0


def test_penalties_come_before_the_temperature_and_the_nucleus():
    params = SamplingParams(presence_penalty=2, temperature=0.5, top_k=1, seed=1)
    assert sample([1.0, 0.0, -9.0], having(params, [2], [0])) == 1


def test_no_end_before_the_least_length_as_in_transformers(llm, model):
    end = llm.generate(PROMPT, SamplingParams(max_tokens=LENGTH))[0].output_token_ids[3]
    settings = {"do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    assert len(generate(model, **settings)) <= 4
    expected = generate(model, min_new_tokens=9, **settings)
    params = SamplingParams(max_tokens=LENGTH, min_tokens=9, stop_token_ids=(end,))
    output = llm.generate(PROMPT, params)[0]
    assert output.output_token_ids == expected
    assert end not in expected[:9]


def test_the_least_length_holds_back_the_models_own_end_also_where_it_is_ignored():
    for ignore in (False, True):
        params = SamplingParams(min_tokens=2, ignore_eos=ignore)
        assert sample([9.0, 1.0], having(params, [1], [1]), eos={0, 77}) == 1
        assert sample([9.0, 1.0], having(params, [1], [1, 1]), eos={0, 77}) == 0


def test_a_stop_token_outside_the_vocabulary_is_no_error():
    params = SamplingParams(min_tokens=2, stop_token_ids=(-1, 5000))
    assert sample([0.0, 1.0], having(params, [1])) == 1


def test_others_in_the_batch_are_not_changed(llm, prompts):
    plain = SamplingParams(max_tokens=12)
    alone = [output.output_token_ids for output in llm.generate(prompts, plain)]
    adjusted = SamplingParams(max_tokens=12, repetition_penalty=1.5, min_tokens=5, logprobs=2)
    settings = [plain if number % 2 else adjusted for number in range(len(prompts))]
    mixed = [output.output_token_ids for output in llm.generate(prompts, settings)]
    assert mixed[1::2] == alone[1::2]
    assert mixed[::2] != alone[::2]


def test_penalties_are_the_same_after_a_preemption(open_llm, llama):
    params = SamplingParams(max_tokens=60, repetition_penalty=1.4, ignore_eos=True)
    prompts = [PROMPT, PROMPT[::-1]]
    roomy = [one.output_token_ids for one in open_llm(llama).generate(prompts, params)]
    tight = open_llm(llama, max_tokens=160, scheduling="max_utilization")
    outputs = tight.generate(prompts, params)
    assert [one.output_token_ids for one in outputs] == roomy
    assert sum(one.preemptions for one in outputs) > 0


def test_no_drafts_where_logits_change_as_tokens_come(open_llm, llama):
    params = SamplingParams(max_tokens=LENGTH, repetition_penalty=0.7, ignore_eos=True)
    plain = open_llm(llama).generate(PROMPT * 3, params)[0]
    drafted = open_llm(llama, speculative="ngram").generate(PROMPT * 3, params)[0]
    assert drafted.output_token_ids == plain.output_token_ids
    assert drafted.drafted_tokens == 0


def test_what_is_remembered_of_a_prompt_goes_with_its_request(llm):
    llm.generate(PROMPT, SamplingParams(max_tokens=3, repetition_penalty=1.5))
    assert llm._engine._sampler._penalties._in_prompt == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("min_tokens", -1),
        ("logprobs", -2),
        ("max_tokens", "9"),
        ("max_tokens", True),
        ("temperature", "0.5"),
        ("ignore_eos", 1),
        ("n", 0),
        ("n", 16385),
    ],
)
def test_ranges_are_vllms(field, value):
    with pytest.raises(
        ConfigurationError, match=rf"SamplingParams\.{field}={re.escape(repr(value))}"
    ):
        SamplingParams(**{field: value})


def test_what_does_not_go_together():
    with pytest.raises(ConfigurationError, match="min_tokens=9 must not exceed max_tokens=8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    with pytest.raises(ConfigurationError, match="n=2 needs a temperature above 0"):
        SamplingParams(n=2)


def test_other_ways_to_say_none():
    params = SamplingParams(top_k=-1, seed=-1, stop=None, stop_token_ids=None)
    assert params == SamplingParams()
