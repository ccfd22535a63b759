"""The request of ``POST /v1/chat/completions``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, StrictBool, model_validator
from transformers import PreTrainedTokenizerBase

from kvconnect.engine.llm import LLM
from kvconnect.engine.request.handle import RequestHandle
from kvconnect.sampling_params import Integer
from kvconnect.server.openai.chat_answer import ChatAnswer
from kvconnect.server.openai.generation_request import GenerationRequest
from kvconnect.server.openai.model_request import ModelRequest

__all__ = ["ChatRequest", "TemplateRequest"]


class TemplateRequest(ModelRequest):
    """A request whose conversation goes through the model's chat template.

    Attributes:
        add_generation_prompt, continue_final_message, chat_template_kwargs: as in `LLM.chat`.
    """

    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _variables_are_the_templates(self) -> Self:
        reserved = (self.chat_template_kwargs or {}).keys() & _reserved()
        if reserved:
            raise ValueError(
                f"chat_template_kwargs: '{min(reserved)}' is no variable of a template"
            )
        return self

    def formatted(self, llm: LLM, messages: list[dict[str, Any]]) -> Any:
        """Returns the prompt of `messages`.

        Raises:
            ConfigurationError: there is no template, or the template refuses them.
        """
        return llm.chat_prompt(
            messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )


class ChatRequest(TemplateRequest, GenerationRequest):
    """A request to answer a conversation; without a length, up to the limit of model and cache.

    Attributes:
        messages: dicts with ``role`` and ``content``.
        logprobs: true to include the log probability of each token.
        top_logprobs: the number of likeliest tokens to include beside it.
    """

    messages: Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    logprobs: StrictBool = False
    top_logprobs: Integer | None = None

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "add_special_tokens": (False,),
        "echo": (False,),
    }

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError(f"top_logprobs={self.top_logprobs} needs logprobs=true")
        return self

    @property
    def completions(self) -> int:
        """The number of completions: `n` for the conversation."""
        return 1 if self.n is None else max(1, self.n)

    def submit(self, llm: LLM, headers: Mapping[str, str]) -> list[RequestHandle]:
        """Starts it."""
        prompt = self.formatted(llm, self.messages)
        most = self.length
        if most is None:
            # A prompt beyond the limit is refused with an error that names the limit.
            most = max(1, llm.max_seq_len - len(prompt["prompt_token_ids"]))
        return self.start(llm, [prompt], self.sampling(max_tokens=most), headers)

    def answer(self, llm: LLM, model: str) -> ChatAnswer:
        """Implements `GenerationRequest.answer`."""
        return ChatAnswer(self.form(llm, model), self.top_logprobs or 0)

    @property
    def top_of_answer(self) -> int | None:
        """Implements `GenerationRequest.top_of_answer`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def max_prompt_tokens(self, longest: int) -> int:
        """Implements `GenerationRequest.max_prompt_tokens`."""
        return longest


@cache
def _reserved() -> frozenset[str]:
    """Returns the arguments of transformers' own: some make it write files or fill memory."""
    return frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
