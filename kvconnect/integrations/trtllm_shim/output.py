"""The results in TensorRT-LLM's form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass, field, replace

from kvconnect.engine.request.handle import RequestHandle
from kvconnect.engine.request.logprobs import TokenLogprobs
from kvconnect.engine.request.output import RequestOutput as EngineOutput
from kvconnect.engine.request.output import StreamChunk

_FINISH_REASONS = {"abort": "cancelled"}


@dataclass(slots=True)
class CompletionOutput:
    """An answer to a prompt, which has `n` of them.

    Attributes:
        index: the number of the answer, from 0.
        text: without special tokens and without the stop string.
        token_ids: a stop token is part of it.
        finish_reason: ``"stop"``, ``"length"``, ``"cancelled"``; ``None`` before the end.
        text_diff, token_ids_diff: the part that is new since the output before this one.
        logprobs: the log probabilities of each token, by token id; empty if not requested.
        stop_reason: not computed.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    text_diff: str = ""
    token_ids_diff: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stop_reason: int | str | None = None

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return len(self.token_ids)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of `logprobs` of its tokens; ``None`` if not requested."""
        if not self.logprobs:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(logprobs[token].logprob for token, logprobs in pairs)


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt.

    Attributes:
        request_id: unique within the engine.
        prompt: the text, if it was given as one.
        prompt_token_ids: its tokens.
        outputs: the `n` answers, by index.
        finished: whether the answer is complete.
        engine_output: kvconnect's own, with the cached tokens' number; ``None`` before the end.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    engine_output: EngineOutput | None = None

    @classmethod
    def of(cls, output: EngineOutput, prompt: str | None) -> RequestOutput:
        """Returns a finished request's output; `prompt` is its text, if it was given as one."""
        completions = [
            CompletionOutput(
                one.index,
                one.text,
                list(one.token_ids),
                _FINISH_REASONS.get(one.finish_reason, one.finish_reason),
                one.text,
                list(one.token_ids),
                list(one.logprobs or ()),
            )
            for one in output.outputs
        ]
        prompt_ids = list(output.prompt_token_ids)
        return cls(output.request_id, prompt, prompt_ids, completions, engine_output=output)


def _grown(completion: CompletionOutput, chunk: StreamChunk) -> CompletionOutput:
    """Returns `completion` with the new part in `chunk`; with none if that is of another one."""
    if chunk.index != completion.index:
        return replace(completion, text_diff="", token_ids_diff=[])
    tokens, reason = list(chunk.token_ids), chunk.finish_reason
    return CompletionOutput(
        completion.index,
        completion.text + chunk.text,
        completion.token_ids + tokens,
        _FINISH_REASONS.get(reason, reason) if reason else None,
        chunk.text,
        tokens,
        completion.logprobs + list(chunk.logprobs or ()),
    )


class RequestResult:
    """A request under way. Await it, iterate over it, or wait for it with `result`.

    Args:
        handle: the request in the engine.
        prompt: its text, if it was given as one.
        n: the number of its answers.
    """

    def __init__(self, handle: RequestHandle, prompt: str | None, n: int = 1) -> None:
        self.request_id = handle.request_id
        self.prompt = prompt
        self._handle = handle
        self._n = n

    @property
    def finished(self) -> bool:
        """Returns whether the request has ended."""
        return self._handle.done

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Returns the whole output; blocks until it is complete.

        Raises:
            TimeoutError: it has not ended within `timeout` seconds; it continues.
            KvConnectError: as `kvconnect.LLM.generate` does.
        """
        return RequestOutput.of(self._handle.result(timeout), self.prompt)

    async def aresult(self) -> RequestOutput:
        """Returns the whole output, as `result` does."""
        return await asyncio.to_thread(self.result)

    def __await__(self) -> Generator[object, None, RequestOutput]:
        return self.aresult().__await__()

    def __iter__(self) -> Iterator[RequestOutput]:
        """Yields the output so far whenever there is more of it; the last one is finished."""
        completions = [CompletionOutput(index, "", []) for index in range(self._n)]
        for chunk in self._handle.stream():
            completions = [_grown(one, chunk) for one in completions]
            done = all(one.finish_reason is not None for one in completions)
            output = self._handle.result() if done else None
            ids = [] if output is None else list(output.prompt_token_ids)
            yield RequestOutput(
                self.request_id, self.prompt, ids, completions, done, engine_output=output
            )

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Yields the output so far whenever there is more of it; the last one is finished."""
        outputs = iter(self)
        while (output := await asyncio.to_thread(next, outputs, None)) is not None:
            yield output

    def abort(self) -> None:
        """Ends the request now; its result has the tokens so far."""
        self._handle.abort()
