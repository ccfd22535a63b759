"""The request of ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator, StrictBool

from kvconnect.engine.llm import LLM
from kvconnect.engine.request.handle import RequestHandle
from kvconnect.sampling_params import Integer
from kvconnect.server.openai.completion_answer import CompletionAnswer, Echo
from kvconnect.server.openai.generation_request import GenerationRequest
from kvconnect.server.openai.model_request import kinds_in

__all__ = ["CompletionRequest"]

_ADDED_TOKENS = 16


def _prompt(given: object) -> object:
    # Pydantic would report an error for each entry of a long list, for minutes, and take `true`
    # and "1" for token ids.
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        kinds = kinds_in(given)
        if kinds == {list}:
            if all(kinds_in(each) <= {int} for each in given):
                return given
        elif kinds <= {int} or kinds == {str}:
            return given
    raise ValueError("must be text, token ids, or a list of either")


class CompletionRequest(GenerationRequest):
    """A request to continue prompts.

    Attributes:
        prompt: text or token ids, or a list of either.
        logprobs: the number of likeliest tokens whose log probabilities are included, besides the
            chosen token's.
        echo: true if the answer begins with the prompt, with log probabilities if `logprobs` is
            given.
    """

    prompt: Annotated[str | list[int] | list[str] | list[list[int]], PlainValidator(_prompt)]
    logprobs: Integer | None = None
    echo: StrictBool = False

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {"add_special_tokens": (True,)}

    @property
    def prompts(self) -> list[Any]:
        """The list of all prompts, each text or token ids."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def completions(self) -> int:
        """The number of completions: `n` for each prompt."""
        return len(self.prompts) * (1 if self.n is None else max(1, self.n))

    def submit(self, llm: LLM, headers: Mapping[str, str]) -> list[RequestHandle]:
        """Starts it."""
        return self.start(llm, self.prompts, self.sampling(), headers)

    def answer(self, llm: LLM, model: str) -> CompletionAnswer:
        """Implements `GenerationRequest.answer`."""
        echo = None
        if self.echo:
            echo = Echo(self.prompts, llm.tokenizer, logprobs=self.logprobs is not None)
        return CompletionAnswer(self.form(llm, model), echo)

    @property
    def top_of_answer(self) -> int | None:
        """Implements `GenerationRequest.top_of_answer`."""
        return self.logprobs

    @property
    def top_of_prompt(self) -> int | None:
        """Implements `GenerationRequest.top_of_prompt`."""
        return (
            self.prompt_logprobs
            if not self.echo or self.logprobs is None
            else (max(self.logprobs, self.prompt_logprobs or 0))
        )

    def max_prompt_tokens(self, longest: int) -> int:
        """Implements `GenerationRequest.max_prompt_tokens`."""
        # No token is shorter than a byte; the tokenizer adds a few.
        sizes = (
            len(one) if isinstance(one, list) else len(one.encode(errors="replace"))
            for one in self.prompts
        )
        return sum(min(longest, size + _ADDED_TOKENS) for size in sizes)
