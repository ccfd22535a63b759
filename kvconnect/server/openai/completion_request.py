"""``POST /v1/completions``: what clients ask for."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainValidator

from kvconnect.engine.llm import LLM
from kvconnect.engine.request.handle import RequestHandle
from kvconnect.server.openai.completion_answer import CompletionAnswer
from kvconnect.server.openai.generation_request import GenerationRequest, Integer

__all__ = ["CompletionRequest"]

_AT_ONCE = 1 << 15  # the interpreter does nothing else meanwhile


def _prompt(given: object) -> object:
    # Pydantic would tell of each entry of a long list what it is not, for minutes, and take `true`
    # and "1" for token ids.
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        kinds = _kinds(given)
        if kinds == {list}:
            if all(_kinds(each) <= {int} for each in given):
                return given
        elif kinds <= {int} or kinds == {str}:
            return given
    raise ValueError("must be text, token ids, or a list of either")


def _kinds(given: list[object]) -> set[type]:
    found: set[type] = set()
    for start in range(0, len(given), _AT_ONCE):
        found.update(map(type, given[start : start + _AT_ONCE]))
    return found


class CompletionRequest(GenerationRequest):
    """Go on from prompts.

    Attributes:
        prompt: text or token ids, or a list of either.
        logprobs: of so many likeliest tokens, besides the chosen one.
    """

    prompt: Annotated[str | list[int] | list[str] | list[list[int]], PlainValidator(_prompt)]
    logprobs: Integer | None = None

    @property
    def prompts(self) -> list[Any]:
        """All of them, each text or token ids."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    @property
    def completions(self) -> int:
        """`n` for each prompt."""
        return len(self.prompts) * (1 if self.n is None else max(1, self.n))

    def submit(self, llm: LLM) -> list[RequestHandle]:
        """Start it."""
        return self.start(llm, self.prompts, self.sampling(logprobs=self.logprobs))

    def answer(self, model: str) -> CompletionAnswer:
        """What will come out of it."""
        return CompletionAnswer(model, self.completions)
