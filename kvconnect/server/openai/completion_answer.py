"""``POST /v1/completions``: what clients get."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from kvconnect.engine.request.logprobs import TokenLogprobs
from kvconnect.engine.request.output import CompletionOutput, StreamChunk
from kvconnect.server.openai.answer import Answer
from kvconnect.server.openai.token_text import token_text, told_logprob

__all__ = ["CompletionAnswer"]


class CompletionAnswer(Answer):
    """OpenAI's completion objects."""

    prefix: ClassVar[str] = "cmpl"
    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    def __init__(self, model: str, completions: int) -> None:
        super().__init__(model, completions)
        self._offsets = [0] * completions  # of the next token of each choice in its text

    def _choice(self, index: int, output: CompletionOutput) -> dict[str, Any]:
        return {
            "index": index,
            "text": output.text,
            "logprobs": self._logprobs(index, output.token_ids, output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _part(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": self._logprobs(index, chunk.token_ids, chunk.logprobs),
            "finish_reason": chunk.finish_reason,
        }

    def _logprobs(
        self, index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        texts, offsets, chosen, top = [], [], [], []
        for token, found in zip(token_ids, logprobs, strict=True):
            text = token_text(token, found[token])
            texts.append(text)
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
            chosen.append(told_logprob(found[token]))
            top.append(_by_text(found))
        return {
            "tokens": texts,
            "token_logprobs": chosen,
            "top_logprobs": top,
            "text_offset": offsets,
        }


def _by_text(found: TokenLogprobs) -> dict[str, float]:
    """Of tokens with one text, parts of characters, the chosen one or the likeliest."""
    top: dict[str, float] = {}
    for token, logprob in found.items():
        top.setdefault(token_text(token, logprob), told_logprob(logprob))
    return top
