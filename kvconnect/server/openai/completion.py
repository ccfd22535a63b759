"""The request of ``POST /v1/completions``, and its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator, StrictBool

from kvconnect.engine.llm import LLM
from kvconnect.engine.request.handle import RequestHandle
from kvconnect.engine.request.logprobs import TokenLogprobs
from kvconnect.engine.request.output import CompletionOutput, StreamChunk
from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.sampling_params import Integer
from kvconnect.server.openai.answer import Answer, Prompted, token_text, told_logprob
from kvconnect.server.openai.generation_request import GenerationRequest
from kvconnect.server.openai.model_request import kinds_in

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
        """Implements `GenerationRequest.completions`."""
        return len(self.prompts) * super().completions

    def submit(self, llm: LLM, headers: Mapping[str, str]) -> list[RequestHandle]:
        """Starts it."""
        return self.start(llm, self.prompts, self.sampling(), headers)

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


class CompletionAnswer(Answer):
    """The completion objects of OpenAI. With ``echo`` each choice begins with its prompt."""

    prefix: ClassVar[str] = "cmpl"
    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    def __init__(self, request: CompletionRequest, llm: LLM, model: str) -> None:
        super().__init__(request, llm, model)
        self._tokenizer = tokenizer = llm.tokenizer
        self._echoes_logprobs = request.echo and request.logprobs is not None
        # Without a tokenizer, prompts of token ids have no text.
        self._echoed_texts = [
            one if isinstance(one, str) else "" if tokenizer is None else tokenizer.whole_text(one)
            for one in (request.prompts if request.echo else ())
        ]
        self._offsets = [0] * request.completions  # offset of the next token, by choice

    def _choice(self, index: int, output: CompletionOutput, prompt: Prompted) -> dict[str, Any]:
        return {
            "index": index,
            "text": self._echoed(index) + output.text,
            "logprobs": self._logprobs(index, output.token_ids, output.logprobs, prompt),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            **self._ids(output.token_ids),
            **self._prompt_fields(prompt),
        }

    def _part(self, chunk: StreamChunk, prompt: Prompted | None) -> dict[str, Any]:
        part = {
            "index": chunk.index,
            "text": chunk.text if prompt is None else self._echoed(chunk.index) + chunk.text,
            "logprobs": self._logprobs(chunk.index, chunk.token_ids, chunk.logprobs, prompt),
            "finish_reason": chunk.finish_reason,
            **self._ids(chunk.token_ids),
        }
        if prompt is not None and self._request.return_token_ids:
            part["prompt_token_ids"] = list(prompt.prompt_token_ids)
        return part

    def _echoed(self, index: int) -> str:
        texts = self._echoed_texts
        return texts[index * len(texts) // self._request.completions] if texts else ""

    def _logprobs(
        self,
        index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
        prompt: Prompted | None,
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        lists = _Lists(self._offsets[index])
        if self._echoes_logprobs and prompt is not None:
            known = prompt.prompt_logprobs or [None] * len(prompt.prompt_token_ids)
            for position, token in enumerate(prompt.prompt_token_ids):
                lists.add(token, known, position, self._tokenizer)
        for position, token in enumerate(token_ids):
            lists.add(token, logprobs, position)
        self._offsets[index] = lists.offset
        return lists.told()


class _Lists:
    """The parallel lists of tokens in a choice.

    Args:
        offset: the offset of the first token in the text.
    """

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self._texts: list[str] = []
        self._offsets: list[int] = []
        self._chosen: list[float | None] = []
        self._top: list[partial[dict[str, float]] | None] = []

    def add(
        self,
        token: int,
        logprobs: Sequence[TokenLogprobs | None],
        index: int,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Adds `token` of `logprobs[index]`; ``None``: the first one of a prompt."""
        found = logprobs[index]
        if found is not None:
            text = token_text(token, found[token])
        else:
            text = f"token_id:{token}" if tokenizer is None else tokenizer.text_of(token)
        self._texts.append(text)
        self._offsets.append(self.offset)
        self.offset += len(text)
        self._chosen.append(None if found is None else told_logprob(found[token]))
        self._top.append(None if found is None else partial(_by_text, logprobs, index))

    def told(self) -> dict[str, Any]:
        """Returns OpenAI's object."""
        return {
            "tokens": self._texts,
            "token_logprobs": self._chosen,
            "top_logprobs": self._top,
            "text_offset": self._offsets,
        }


def _by_text(logprobs: Sequence[TokenLogprobs | None], index: int) -> dict[str, float]:
    """Maps texts to log probabilities; of several tokens with one text, the first counts."""
    found = logprobs[index] or {}
    top: dict[str, float] = {}
    for token, logprob in found.items():
        top.setdefault(token_text(token, logprob), told_logprob(logprob))
    return top
