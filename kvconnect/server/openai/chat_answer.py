"""The answer to ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, ClassVar

from kvconnect.engine.request.logprobs import Logprob, TokenLogprobs
from kvconnect.engine.request.output import CompletionOutput, StreamChunk
from kvconnect.server.openai.answer import Answer, AnswerForm, Prompted, token_text, told_logprob

__all__ = ["ChatAnswer"]


class ChatAnswer(Answer):
    """The chat completion objects of OpenAI.

    Args:
        form: the form of the answer.
        top_logprobs: the number of likeliest tokens beside each token.
    """

    prefix: ClassVar[str] = "chatcmpl"
    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, form: AnswerForm, top_logprobs: int) -> None:
        super().__init__(form)
        self._top_logprobs = top_logprobs

    def _beginning(self) -> Iterable[dict[str, Any]]:
        """Yields chunks that name the role, one for each choice."""
        for index in range(self._form.completions):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            made = self._chunk([choice])
            if index == 0 and self._form.token_ids and self._prompts:
                made["prompt_token_ids"] = list(self._prompts[0].prompt_token_ids)
            yield made

    def _of_prompt(self, prompt: Prompted) -> dict[str, Any]:
        return self._prompt_fields(prompt)

    def _choice(self, index: int, output: CompletionOutput, prompt: Prompted) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": output.text},
            "logprobs": self._logprobs(output.token_ids, output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        } | self._ids(output.token_ids)

    def _part(self, index: int, chunk: StreamChunk, prompt: Prompted | None) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": chunk.text},
            "logprobs": self._logprobs(chunk.token_ids, chunk.logprobs),
            "finish_reason": chunk.finish_reason,
        } | self._ids(chunk.token_ids)

    def _logprobs(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        made = partial(self._token, token_ids, logprobs)
        return {"content": [partial(made, index) for index in range(len(token_ids))]}

    def _token(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], index: int
    ) -> dict[str, Any]:
        token, found = token_ids[index], logprobs[index]
        # The chosen token comes first, whatever its rank.
        by_rank = sorted(found.items(), key=lambda item: item[1].rank)
        top = [_entry(one, each) for one, each in by_rank[: self._top_logprobs]]
        return _entry(token, found[token]) | {"top_logprobs": top}


def _entry(token: int, logprob: Logprob) -> dict[str, Any]:
    text = token_text(token, logprob)
    return {"token": text, "logprob": told_logprob(logprob), "bytes": list(text.encode())}
