"""The common part of answers to completions and chats."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, ClassVar, Protocol

from kvconnect.engine.llm import LLM
from kvconnect.engine.request.logprobs import Logprob, PromptLogprobs
from kvconnect.engine.request.output import CompletionOutput, RequestOutput, StreamChunk
from kvconnect.explain.outcome import Outcome, Span, merged
from kvconnect.server.openai.generation_request import GenerationRequest

_NEVER = -9999.0
"""The log probability that OpenAI's API gives an impossible token: JSON has no infinity."""


class Prompted(Protocol):
    """The interface to the prompt of a request, which handles and outputs have."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The token ids of the prompt."""

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """The log probabilities of each token; ``None`` if not requested."""


class Answer(ABC):
    """The JSON objects that answer one request.

    Without a salt, cached tokens are counted in whole blocks: exact counts would reveal others'
    unsalted prompts token by token. Choices are numbered over all prompts.

    Args:
        request: the request that is answered.
        llm: the engine.
        model: the clients' name of the model.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, request: GenerationRequest, llm: LLM, model: str) -> None:
        self._request = request
        self._model = model
        self._has_salt = request.cache_salt is not None
        self._granularity = 1 if self._has_salt else llm.layout.tokens_per_block
        self._id = f"{self.prefix}-{request.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._begun: set[int] = set()  # choices that have had a chunk in the stream
        self._prompts: Sequence[Prompted] = ()
        self._prompt_tokens = 0
        self._answer_tokens = 0

    def whole(self, outputs: Sequence[RequestOutput], more: Mapping[str, Any]) -> bytes:
        """Returns the whole answer as JSON, with the fields `more`.

        The text is made choice by choice, because it may be long.

        Args:
            outputs: the outputs of each prompt.
            more: further fields of the object.
        """
        head = _encoded(self._object(self.kind) | self._of_prompt(outputs[0]))
        choices = b",".join(map(_encoded, self._choices(outputs)))
        usage = {"usage": self._usage(outputs)}
        return head[:-1] + b',"choices":[' + choices + b"]," + _encoded(usage | dict(more))[1:]

    def begin(self, prompts: Sequence[Prompted]) -> Iterable[dict[str, Any]]:
        """Returns the first chunks of a stream, before any token.

        Args:
            prompts: the prompts of the request.
        """
        self._prompts = prompts
        self._prompt_tokens = sum(len(one.prompt_token_ids) for one in prompts)
        return self._beginning()

    def chunk(self, chunk: StreamChunk) -> dict[str, Any]:
        """Returns the next chunk of a stream; its index is that of the choice."""
        prompt = None if chunk.index in self._begun else self._prompt_of(chunk.index)
        self._begun.add(chunk.index)
        self._answer_tokens += len(chunk.token_ids)
        return self._chunk([self._part(chunk, prompt)])

    def end(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns the last chunk, with the counts of tokens."""
        usage = self._usage(outputs)
        return self._object(self.chunk_kind) | {"choices": [], "usage": usage}

    def _usage(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Returns OpenAI's ``usage`` of all prompts of a request together.

        ``cached_tokens`` are the prompt tokens that were not computed, from any cache or store,
        rounded down for each prompt. With several completions, the prompt tokens that each of them
        computed are subtracted.
        """
        cached = 0
        for output in outputs:
            reused = max(0, output.prompt_tokens - output.computed_tokens)
            cached += reused - reused % self._granularity
        prompt = sum(output.prompt_tokens for output in outputs)
        answer = sum(len(one.token_ids) for output in outputs for one in output.outputs)
        usage = _counts(prompt, answer) | {"prompt_tokens_details": {"cached_tokens": cached}}
        if self._request.kvconnect is not None and self._request.kvconnect.explain:
            explained = _explained(outputs, self._granularity, has_salt=self._has_salt)
            usage["kvconnect"] = {"explain": explained}
        return usage

    def _choices(self, outputs: Sequence[RequestOutput]) -> Iterator[dict[str, Any]]:
        index = 0
        for output in outputs:
            for one in output.outputs:
                yield self._choice(index, one, output)
                index += 1

    def _prompt_of(self, index: int) -> Prompted | None:
        if not self._prompts:
            return None
        return self._prompts[index * len(self._prompts) // self._request.completions]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        made = self._object(self.chunk_kind) | {"choices": choices}
        options = self._request.stream_options
        if options.include_usage:
            made["usage"] = None
            if options.continuous_usage_stats:
                made["usage"] = _counts(self._prompt_tokens, self._answer_tokens)
        return made

    def _beginning(self) -> Iterable[dict[str, Any]]:
        return ()

    def _of_prompt(self, prompt: Prompted) -> dict[str, Any]:
        """Returns the fields about the prompt, beside the choices of a whole answer."""
        return {}

    @abstractmethod
    def _choice(self, index: int, output: CompletionOutput, prompt: Prompted) -> dict[str, Any]: ...

    @abstractmethod
    def _part(self, chunk: StreamChunk, prompt: Prompted | None) -> dict[str, Any]:
        """Returns a choice of a chunk; `prompt` is set in the first one of this choice."""

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(token_ids)} if self._request.return_token_ids else {}

    def _prompt_fields(self, prompt: Prompted) -> dict[str, Any]:
        """Returns the token ids and log probabilities of a prompt, in vLLM's fields."""
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = list(prompt.prompt_token_ids)
        if self._request.prompt_logprobs is not None and prompt.prompt_logprobs is not None:
            fields["prompt_logprobs"] = [
                partial(_of_prompt_token, prompt.prompt_logprobs, index)
                for index in range(len(prompt.prompt_logprobs))
            ]
        return fields

    def _object(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}


def made_late(value: object) -> object:
    """Returns the result of calling `value`; used as ``default`` of JSON encoders.

    The log probabilities of each token are such calls in answers. Their results take fifty times
    the memory of their source tables, and are freed once they are encoded.
    """
    if not isinstance(value, partial):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return value()


def token_text(token: int, logprob: Logprob) -> str:
    """Returns the text of `token` alone; without a tokenizer, its id in vLLM's form."""
    return f"token_id:{token}" if logprob.decoded_token is None else logprob.decoded_token


def told_logprob(logprob: Logprob) -> float:
    """Returns the finite log probability to send for `logprob`."""
    return max(_NEVER, logprob.logprob)


def _of_prompt_token(logprobs: PromptLogprobs, index: int) -> dict[int, dict[str, Any]] | None:
    found = logprobs[index]
    if found is None:
        return None
    return {token: asdict(each) | {"logprob": told_logprob(each)} for token, each in found.items()}


def _counts(prompt: int, answer: int) -> dict[str, Any]:
    """Returns the part of ``usage`` that is known at any time."""
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}


def _encoded(content: dict[str, Any]) -> bytes:
    text = json.dumps(
        content, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=made_late
    )
    return text.encode()


_OF_THE_REQUEST = frozenset({Outcome.LAST, Outcome.LOGPROBS, Outcome.UNREACHED})
"""The outcomes that depend on no other request."""
_OTHERS = frozenset({Outcome.NAMESPACE})
"""The outcomes that would reveal other tenants' prompts."""
_FINE = _OTHERS | {Outcome.TAIL, Outcome.DIVERGED}
"""These outcomes, and those that would reveal single tokens of prompts without a salt."""


def _explained(
    outputs: Sequence[RequestOutput], granularity: int, *, has_salt: bool
) -> list[dict[str, Any]]:
    """Returns the explanation of each prompt of a request.

    The result reveals nothing about prompts under other salts: ``namespace`` counts as ``new``. A
    request without a salt shares its cache with all such requests, and its result covers whole
    blocks only: otherwise a client could find out others' prompts token by token. Then ``diverged``
    and ``tail`` count as ``new``, as does the part of a block before the last token, and no
    divergence is shown.

    Args:
        outputs: the outputs of each prompt.
        granularity: for requests without a salt, the tokens of a block, to which ends of spans are
            rounded down.
        has_salt: true if the request has a salt.
    """
    explained = []
    for output in outputs:
        found = output.explain()
        if has_salt:
            spans = merged(_shown(span, _OTHERS) for span in found.spans)
        else:
            spans = merged(_in_blocks(found.spans, granularity, output.prompt_tokens - 1))
        tokens: Counter[str] = Counter()
        for span in spans:
            tokens[span.outcome] += len(span)
        told = [
            {name: value for name, value in asdict(one).items() if value != ""} for one in spans
        ]
        shown: dict[str, Any] = {"tokens": tokens, "spans": told}
        there = found.divergence
        if has_salt and there is not None:
            shown["divergence"] = {
                "position": there.position,
                "before": there.before,
                "prompt": there.prompt_text,
                "cached": there.cached_text,
            }
        explained.append(shown)
    return explained


def _in_blocks(spans: Sequence[Span], size: int, last: int) -> Iterator[Span]:
    """Yields `spans` rounded to whole blocks; `last` is the last token."""
    end = last - last % size
    for span in spans:
        low, high = min(span.start, end), min(span.end, end)
        yield replace(_shown(span, _FINE), start=low - low % size, end=high - high % size)
    for span in spans:
        rest = replace(span, start=max(span.start, end))
        yield rest if rest.outcome in _OF_THE_REQUEST else _new(rest)


def _shown(span: Span, hidden: frozenset[Outcome]) -> Span:
    return _new(span) if span.outcome in hidden else span


def _new(span: Span) -> Span:
    return replace(span, outcome=Outcome.NEW, detail="")
