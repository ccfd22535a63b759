"""``POST /v1/chat/completions``: what clients ask for."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Annotated, Any, Self

from pydantic import Field, StrictBool, model_validator
from transformers import PreTrainedTokenizerBase

from kvconnect.engine.llm import LLM
from kvconnect.engine.request.handle import RequestHandle
from kvconnect.server.openai.chat_answer import ChatAnswer
from kvconnect.server.openai.generation_request import GenerationRequest, Integer

__all__ = ["ChatRequest"]


class ChatRequest(GenerationRequest):
    """Answer a conversation.

    Attributes:
        messages: dicts with ``role`` and ``content``.
        max_completion_tokens: as `max_tokens`, its later name. Without either the answer may be as
            long as the model and the cache allow.
        logprobs: whether to give the log probability of each token.
        top_logprobs: also of so many likeliest ones.
        add_generation_prompt, continue_final_message, chat_template_kwargs: as in `LLM.chat`.
    """

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    max_completion_tokens: Integer | None = None
    logprobs: StrictBool = False
    top_logprobs: Integer | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
        if None not in {self.max_tokens, self.max_completion_tokens}:
            raise ValueError("max_tokens and max_completion_tokens are the same: give one of them")
        reserved = (self.chat_template_kwargs or {}).keys() & _reserved()
        if reserved:
            raise ValueError(
                f"chat_template_kwargs: '{min(reserved)}' is no variable of a template"
            )
        return self

    @property
    def completions(self) -> int:
        """`n` for the conversation."""
        return 1 if self.n is None else max(1, self.n)

    def submit(self, llm: LLM) -> list[RequestHandle]:
        """Start it."""
        prompt: Any = llm.chat_prompt(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if most is None:
            # A prompt beyond the limit is refused with what there is room for.
            most = max(1, llm.max_seq_len - len(prompt["prompt_token_ids"]))
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        params = self.sampling(max_tokens=most, logprobs=logprobs)
        return self.start(llm, [prompt], params)

    def answer(self, model: str) -> ChatAnswer:
        """What will come out of it."""
        return ChatAnswer(model, self.completions, self.top_logprobs or 0)


@cache
def _reserved() -> frozenset[str]:
    """Arguments of transformers' own: some make it write files or fill memory."""
    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
