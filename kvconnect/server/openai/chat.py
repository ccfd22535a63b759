"""The request of ``POST /v1/chat/completions``, and its answer."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, StrictBool, model_validator
from transformers import PreTrainedTokenizerBase

from kvconnect.engine.llm import LLM
from kvconnect.engine.request.handle import RequestHandle
from kvconnect.engine.request.logprobs import Logprob, TokenLogprobs
from kvconnect.engine.request.output import CompletionOutput, StreamChunk
from kvconnect.sampling_params import Integer
from kvconnect.server.openai.answer import Answer, Prompted, token_text, told_logprob
from kvconnect.server.openai.generation_request import GenerationRequest
from kvconnect.server.openai.model_request import ModelRequest


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

    def submit(self, llm: LLM, headers: Mapping[str, str]) -> list[RequestHandle]:
        """Starts it."""
        prompt = self.formatted(llm, self.messages)
        most = self.length
        if most is None:
            # A prompt beyond the limit is refused with an error that names the limit.
            most = max(1, llm.max_seq_len - len(prompt["prompt_token_ids"]))
        return self.start(llm, [prompt], self.sampling(max_tokens=most), headers)

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
    names = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    return frozenset(names) | {"messages"}


class ChatAnswer(Answer):
    """The chat completion objects of OpenAI."""

    prefix: ClassVar[str] = "chatcmpl"
    kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, llm: LLM, model: str) -> None:
        super().__init__(request, llm, model)
        self._top_logprobs = request.top_logprobs or 0

    def _beginning(self) -> Iterable[dict[str, Any]]:
        """Yields chunks that name the role, one for each choice."""
        for index in range(self._request.completions):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            made = self._chunk([choice])
            if index == 0 and self._request.return_token_ids and self._prompts:
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

    def _part(self, chunk: StreamChunk, prompt: Prompted | None) -> dict[str, Any]:
        return {
            "index": chunk.index,
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
