"""Outputs of the engine as JSON objects, without a server around them."""

from __future__ import annotations

import json
import math

import pytest

from kvconnect.engine.request.logprobs import Logprob
from kvconnect.engine.request.output import StreamChunk
from kvconnect.server.openai.answer import AnswerForm
from kvconnect.server.openai.chat_answer import ChatAnswer
from kvconnect.server.openai.completion_answer import CompletionAnswer

FORM = AnswerForm("m")


@pytest.mark.parametrize("worst", [-math.inf, math.nan])
@pytest.mark.parametrize("answer", [CompletionAnswer(FORM), ChatAnswer(FORM, 2)])
def test_a_token_that_cannot_come_has_a_finite_log_probability(answer, worst):
    logprobs = {5: Logprob(worst, 2, "x"), 6: Logprob(-0.5, 1, "y")}
    chunk = StreamChunk(0, (5,), "x", None, logprobs=(logprobs,))
    told = json.dumps(answer.chunk(0, chunk), allow_nan=False)
    assert "-9999.0" in told
    assert "-0.5" in told
