"""Log probabilities of the chosen token and of the likeliest: those of the model itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvconnect import SamplingParams
from kvconnect.errors import ConfigurationError

PROMPT = list(b"Once upon a time there was a cache.")


@pytest.fixture(scope="module")
def model(llama):
    return AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float64)


@pytest.fixture
def llm(open_llm, llama):
    return open_llm(llama)


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
