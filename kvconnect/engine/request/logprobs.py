"""Log probabilities of tokens: of the chosen one, and of the likeliest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.request import LlmRequest

__all__ = ["Logprob", "TokenLogprobs", "TopTokens", "token_logprobs", "top_tokens"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """What the model thinks of one token.

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 is the likeliest.
        decoded_token: its text alone; ``None`` without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


TokenLogprobs: TypeAlias = Mapping[int, Logprob]
"""By token id: the chosen token first, then the likeliest in order."""


@dataclass(frozen=True, slots=True)
class TopTokens:
    """What was chosen from one row of logits, and the likeliest tokens of it.

    Attributes:
        token_ids: the chosen token, then the likeliest ones in order.
        logprobs: of each.
        rank: of the chosen one, from 1.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


def top_tokens(logits: Tensor, request: LlmRequest, tokens: Sequence[int]) -> list[TopTokens]:
    """What `request` asks for, of each of `tokens`; empty if it asks for none.

    Args:
        logits: ``[rows, vocab]`` of the request, as the model gave them; rows beyond those of
            `tokens` are left out.
        request: whose they are.
        tokens: chosen from each row.
    """
    count = request.sampling_params.logprobs
    if count is None:
        return []
    return [_top(row, token, count) for row, token in zip(logits, tokens, strict=False)]


def _top(logits: Tensor, token: int, count: int) -> TopTokens:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    size = len(logprobs) if count == -1 else min(count, len(logprobs))
    best = torch.topk(logprobs, size)
    return TopTokens(
        [token, *best.indices.tolist()],
        [logprobs[token].item(), *best.values.tolist()],
        int((logprobs > logprobs[token]).sum()) + 1,
    )


def token_logprobs(found: TopTokens, tokenizer: Tokenizer | None) -> TokenLogprobs:
    """`found` by token, with texts."""
    ranks = (found.rank, *range(1, len(found.token_ids)))
    return {
        token: Logprob(logprob, rank, None if tokenizer is None else tokenizer.text_of(token))
        for token, logprob, rank in zip(found.token_ids, found.logprobs, ranks, strict=True)
    }
