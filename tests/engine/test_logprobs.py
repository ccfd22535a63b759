"""Log probabilities of the chosen token and of the likeliest: those of the model itself."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvconnect import SamplingParams
from kvconnect.engine.request import logprobs
from kvconnect.engine.request.logprobs import LogprobTable, top_tokens
from kvconnect.errors import ConfigurationError

PROMPT = list(b"Once upon a time there was a cache.")


@pytest.fixture(scope="module")
def model(llama):
    return AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64)


def expected_logprobs(model, tokens):
    """Of each of `tokens` behind the prompt, ``[len(tokens), vocab]``."""
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + list(tokens)])).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(logits.float(), dim=-1)


def test_greedy(llm, model):
    output = llm.generate(PROMPT, SamplingParams(max_tokens=12, logprobs=3))[0]
    tokens = output.output_token_ids
    wanted = expected_logprobs(model, tokens)
    assert len(output.logprobs) == len(tokens)
    for row, (token, found) in enumerate(zip(tokens, output.logprobs, strict=True)):
        best = torch.topk(wanted[row], 3)
        assert list(found) == best.indices.tolist()
        assert next(iter(found)) == token
        assert [one.rank for one in found.values()] == [1, 2, 3]
        assert [one.logprob for one in found.values()] == pytest.approx(
            best.values.tolist(), abs=1e-4
        )
    total = sum(wanted[row, token].item() for row, token in enumerate(tokens))
    assert output.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_they_are_those_before_penalties_and_temperature(llm, model):
    params = SamplingParams(
        max_tokens=12, logprobs=2, temperature=3.0, seed=4, repetition_penalty=1.9, min_tokens=12
    )
    output = llm.generate(PROMPT, params)[0]
    wanted = expected_logprobs(model, output.output_token_ids)
    beyond = 0
    for row, token in enumerate(output.output_token_ids):
        found = output.logprobs[row]
        assert found[token].logprob == pytest.approx(wanted[row, token].item(), abs=1e-4)
        assert found[token].rank == 1 + int((wanted[row] > wanted[row, token]).sum())
        assert set(found) == {token, *torch.topk(wanted[row], 2).indices.tolist()}
        beyond += len(found) == 3
    assert beyond > 0


def test_none_but_the_chosen_one(llm):
    output = llm.generate(PROMPT, SamplingParams(max_tokens=4, logprobs=0))[0]
    assert [list(one) for one in output.logprobs] == [[token] for token in output.output_token_ids]


def test_not_asked_for(llm):
    output = llm.generate(PROMPT, SamplingParams(max_tokens=4))[0]
    assert output.logprobs is None
    assert output.cumulative_logprob is None


def test_the_whole_vocabulary(open_llm, llama):
    llm = open_llm(llama, max_logprobs=-1)
    (found,) = llm.generate(PROMPT, SamplingParams(max_tokens=1, logprobs=-1))[0].logprobs
    assert len(found) == 260
    assert sum(2.718281828459045**one.logprob for one in found.values()) == pytest.approx(1)


@pytest.mark.parametrize("wanted", [21, -1])
def test_more_than_the_engine_gives(llm, wanted):
    with pytest.raises(ConfigurationError, match="more than max_logprobs=20; ask for fewer"):
        llm.generate(PROMPT, SamplingParams(logprobs=wanted))


def test_a_limit_below_all(open_llm, llama):
    with pytest.raises(ConfigurationError, match="max_logprobs: -2 must be at least 0, or -1"):
        open_llm(llama, max_logprobs=-2)


def test_texts_are_those_of_single_tokens(llm, llama):
    params = SamplingParams(max_tokens=2, logprobs=20, ignore_eos=True)
    for found in llm.generate(PROMPT, params)[0].logprobs:
        for token, one in found.items():
            if token < 128:
                assert one.decoded_token == chr(token)


def test_chunks_of_a_stream_have_those_of_their_tokens(llm):
    params = SamplingParams(max_tokens=9, logprobs=1)
    whole = llm.generate(PROMPT, params)[0].logprobs
    streamed = []
    for chunk in llm.stream(PROMPT, params):
        assert len(chunk.logprobs) == len(chunk.token_ids)
        streamed += chunk.logprobs
    assert [list(one) for one in streamed] == [list(one) for one in whole]


def test_accepted_drafts_have_theirs(open_llm, llama):
    params = SamplingParams(max_tokens=30, logprobs=2, ignore_eos=True)
    plain = open_llm(llama).generate(PROMPT, params)[0]
    answer = [*PROMPT, *plain.output_token_ids]

    class Knowing:
        """Two right drafts and a wrong one."""

        def propose(self, tokens, limit):
            known = len(tokens)
            return np.array([*answer[known : known + 2], 255][:limit], np.int32)

    llm = open_llm(llama, speculative="ngram")
    llm._engine._scheduler._drafter = Knowing()
    drafted = llm.generate(PROMPT, params)[0]
    assert drafted.output_token_ids == plain.output_token_ids
    assert drafted.accepted_tokens > 10
    assert [list(one) for one in drafted.logprobs] == [list(one) for one in plain.logprobs]
    assert drafted.cumulative_logprob == pytest.approx(plain.cumulative_logprob, abs=1e-3)


# ---------------------------------------------------------------- of the prompt


def expected_of_prompt(model, prompt):
    with torch.inference_mode():
        logits = model(torch.tensor([list(prompt)])).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def check_prompt_logprobs(found, model, prompt, count):
    """`found` is that of `prompt`, with its `count` likeliest tokens each."""
    wanted = expected_of_prompt(model, prompt)
    assert len(found) == len(prompt)
    assert found[0] is None
    for row, (token, each) in enumerate(zip(prompt[1:], list(found)[1:], strict=True)):
        assert next(iter(each)) == token
        assert each[token].logprob == pytest.approx(wanted[row, token].item(), abs=1e-4)
        assert each[token].rank == 1 + int((wanted[row] > wanted[row, token]).sum())
        best = torch.topk(wanted[row], count).indices.tolist()
        assert set(each) == {token, *best}


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_of_the_prompt(llm, model, max_tokens):
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=2)
    output = llm.generate(PROMPT, params)[0]
    check_prompt_logprobs(output.prompt_logprobs, model, PROMPT, 2)
    assert output.logprobs is None


def test_of_a_prompt_that_is_cached(llm, model):
    """The cache has the prompt: it is computed all the same, and others go on using the cache."""
    plain = llm.generate(PROMPT, SamplingParams(max_tokens=5))[0]
    scored = llm.generate(PROMPT, SamplingParams(max_tokens=5, prompt_logprobs=1))[0]
    check_prompt_logprobs(scored.prompt_logprobs, model, PROMPT, 1)
    assert scored.computed_tokens == len(PROMPT)
    assert scored.output_token_ids == plain.output_token_ids
    again = llm.generate(PROMPT, SamplingParams(max_tokens=5))[0]
    assert again.computed_tokens == 1
    assert again.prompt_logprobs is None


def test_of_a_prompt_in_a_store(open_llm, llama, model, tmp_path):
    url = f"disk:{tmp_path}/kv"
    llm = open_llm(llama, connector=url)
    llm.generate(PROMPT, SamplingParams(max_tokens=2))
    llm.close()
    llm = open_llm(llama, connector=url)
    assert llm.generate([*PROMPT, 3], SamplingParams(max_tokens=1))[0].reused_store_tokens
    llm.close()
    llm = open_llm(llama, connector=url)
    scored = llm.generate(PROMPT, SamplingParams(max_tokens=2, prompt_logprobs=0))[0]
    assert (scored.reused_store_tokens, scored.computed_tokens) == (0, len(PROMPT))
    check_prompt_logprobs(scored.prompt_logprobs, model, PROMPT, 0)


def test_of_a_prompt_in_chunks_beside_others(open_llm, llama, model):
    """Prompts that begin alike wait for each other elsewhere; those that are scored do not."""
    llm = open_llm(llama, max_num_tokens=7)
    prompts = [PROMPT, PROMPT[:20], [*PROMPT, 65, 66], PROMPT]
    params = [SamplingParams(max_tokens=3, prompt_logprobs=k) for k in (1, 2, 3)]
    outputs = llm.generate(prompts, [*params, SamplingParams(max_tokens=3)])
    for prompt, output, count in zip(prompts, outputs, (1, 2, 3), strict=False):
        check_prompt_logprobs(output.prompt_logprobs, model, prompt, count)
    assert outputs[0].output_token_ids == outputs[3].output_token_ids


def test_only_the_first_of_several_completions_computes_the_prompt(llm, model):
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=2, prompt_logprobs=1)
    output = llm.generate(PROMPT, params)[0]
    check_prompt_logprobs(output.prompt_logprobs, model, PROMPT, 1)
    assert output.computed_tokens < 2 * len(PROMPT)


def test_of_a_prompt_that_was_preempted_in_the_middle(open_llm, llama, model):
    """One that generates takes its blocks while it is computed, a token in each step."""
    llm = open_llm(
        llama,
        kv_cache={"max_tokens": 64, "tokens_per_block": 4},
        scheduling="max_utilization",
        max_num_tokens=2,
    )
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    scored = SamplingParams(max_tokens=2, prompt_logprobs=1)
    _, output = llm.generate([PROMPT[:2], PROMPT], [long, scored])
    assert output.preemptions > 0
    check_prompt_logprobs(output.prompt_logprobs, model, PROMPT, 1)


def test_a_prompt_of_one_token_has_none(llm):
    output = llm.generate([65], SamplingParams(max_tokens=1, prompt_logprobs=1))[0]
    assert list(output.prompt_logprobs) == [None]


def test_more_than_is_allowed_of_the_prompt(llm):
    with pytest.raises(ConfigurationError, match="prompt_logprobs: 21 are more than max_logprobs"):
        llm.generate(PROMPT, SamplingParams(prompt_logprobs=21))


def test_log_probabilities_take_little_memory():
    """8 bytes for each, and not one object: an answer may have a million of them."""
    table = LogprobTable(None)
    one = top_tokens(torch.randn(1, 64), [3], 20)
    tracemalloc.start()
    try:
        for _ in range(4096):
            table.append(one)
        own = tracemalloc.Filter(inclusive=True, filename_pattern=logprobs.__file__)
        snapshot = tracemalloc.take_snapshot().filter_traces([own])
    finally:
        tracemalloc.stop()
    used = sum(trace.size for trace in snapshot.traces)
    assert 4096 * 21 * 8 < used < 2 * 4096 * 21 * 9
    view = table.view(4000)
    table.append(one)
    assert len(view) == 96
    assert len(view[5]) >= 20


def test_min_p_keeps_what_is_likely_enough(llm):
    params = SamplingParams(temperature=5.0, min_p=1.0, max_tokens=8, seed=3)
    greedy = llm.generate(PROMPT, SamplingParams(max_tokens=8))[0]
    assert llm.generate(PROMPT, params)[0].output_token_ids == greedy.output_token_ids
    free = llm.generate(PROMPT, params.model_copy(update={"min_p": 0.0}))[0]
    assert free.output_token_ids != greedy.output_token_ids
