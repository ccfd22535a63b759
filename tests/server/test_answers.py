"""Outputs of the engine as JSON objects, without a server around them."""

from __future__ import annotations

import json
import math
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from own_process import own_process

from kvconnect.engine.request.logprobs import Logprob, LogprobTable, TopTokens
from kvconnect.engine.request.output import StreamChunk
from kvconnect.server.openai.answer import made_late
from kvconnect.server.openai.chat import ChatAnswer, ChatRequest
from kvconnect.server.openai.completion import CompletionAnswer, CompletionRequest

LLM = SimpleNamespace(layout=SimpleNamespace(tokens_per_block=16), tokenizer=None)


def answers(top):
    chat = ChatRequest(messages=[], logprobs=True, top_logprobs=top)
    return [CompletionAnswer(CompletionRequest(prompt="x"), LLM, "m"), ChatAnswer(chat, LLM, "m")]


@pytest.mark.parametrize("worst", [-math.inf, math.nan])
@pytest.mark.parametrize("answer", answers(2))
def test_a_token_that_cannot_come_has_a_finite_log_probability(answer, worst):
    logprobs = {5: Logprob(worst, 2, "x"), 6: Logprob(-0.5, 1, "y")}
    chunk = StreamChunk(0, (5,), "x", None, logprobs=(logprobs,))
    told = json.dumps(answer.chunk(chunk), allow_nan=False, default=made_late)
    assert "-9999.0" in told
    assert "-0.5" in told


@own_process
def test_log_probabilities_are_made_when_they_become_text():
    for answer in answers(20):
        check_made_late(answer)


def check_made_late(answer):
    count = 400
    candidates = np.arange(count * 21, dtype=np.int32).reshape(count, -1)
    table = LogprobTable(None)
    likely = np.full(candidates.shape, -0.5, np.float32)
    table.append(TopTokens(candidates, likely, np.ones(count, np.int32)))
    ids = tuple(candidates[:, 0].tolist())
    chunk = StreamChunk(0, ids, "x", None, logprobs=table.view())
    tracemalloc.start()
    try:
        made = answer.chunk(chunk)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 800 * count  # those of 20 tokens as objects take 2,000 to 10,000 bytes
    (choice,) = json.loads(json.dumps(made, default=made_late))["choices"]
    logprobs = choice["logprobs"]
    told = logprobs.get("top_logprobs") or [one["top_logprobs"] for one in logprobs["content"]]
    assert [len(one) for one in told] == [21 if "tokens" in logprobs else 20] * count
