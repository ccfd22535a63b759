"""The common part of requests for completions and chats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field, StrictBool, StrictInt

from kvconnect.cache_options import CacheOptions
from kvconnect.engine.llm import LLM
from kvconnect.engine.request.handle import RequestHandle
from kvconnect.errors import ConfigurationError
from kvconnect.keys import check_salt
from kvconnect.request import SamplingParams
from kvconnect.sampling_params import Integer, Real
from kvconnect.server.openai.kv_transfer import KvTransferParams
from kvconnect.server.openai.model_request import ModelRequest
from kvconnect.settings import Settings

_MAX_STOPS = 64
_MAX_STOP_TOKENS = 1024
_MAX_ID = 256


Stop = Annotated[str, Field(min_length=1, max_length=1000)]


class StreamOptions(Settings):
    """The options of a stream.

    Attributes:
        include_usage: true if a last chunk without choices has the counts of tokens; they are
            ``null`` in all others.
        continuous_usage_stats: with `include_usage`, true if all other chunks have the counts so
            far.
        include_obfuscation: accepted, without effect.
    """

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False
    include_obfuscation: StrictBool = False


class KvConnectOptions(CacheOptions):
    """The field ``kvconnect`` of a request: also the fields of `CacheOptions`.

    Attributes:
        explain: true if the answer's ``usage`` has a ``kvconnect`` with the outcome of each prompt
            token.
    """

    explain: StrictBool = False


class GenerationRequest(ModelRequest):
    """The fields of both kinds of requests. Names are OpenAI's and, beyond those, vLLM's.

    ``None`` equals a missing field. `SamplingParams` documents the sampling parameters; the default
    temperature is OpenAI's, 1.

    Attributes:
        stream: true to answer with server-sent events.
        stream_options: options of the stream.
        request_id: a part of the answer's id.
        return_token_ids: true to include the ids of all tokens.
        max_tokens, max_completion_tokens: the most tokens of the answer; the second name has
            precedence.
        prompt_logprobs: the number of likeliest tokens whose log probabilities are included for
            each token of the prompt. Not in a stream.
        cache_salt: 1 to 1,024 characters; requests share cached blocks only if their salts are
            equal.
        kv_transfer_params: a router's order to publish the prompt without generating, or to fetch
            it.
        kvconnect: options beyond OpenAI's and vLLM's.
    """

    stream: StrictBool | None = None
    stream_options: StreamOptions = StreamOptions()
    request_id: Annotated[str, Field(min_length=1, max_length=_MAX_ID)] | None = None
    return_token_ids: StrictBool = False
    cache_salt: str | None = None
    kv_transfer_params: KvTransferParams | None = None
    kvconnect: KvConnectOptions | None = None
    n: Integer | None = None
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    min_tokens: Integer | None = None
    temperature: Real | None = None
    top_k: Integer | None = None
    top_p: Real | None = None
    min_p: Real | None = None
    seed: Integer | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    repetition_penalty: Real | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=_MAX_STOPS)] | None = None
    stop_token_ids: (
        Annotated[list[StrictInt], Field(fail_fast=True, max_length=_MAX_STOP_TOKENS)] | None
    ) = None
    ignore_eos: StrictBool | None = None
    prompt_logprobs: Integer | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Parses `body` like `ModelRequest.parse`; also checks the salt."""
        check_salt(body.get("cache_salt"))
        request = super().parse(body)
        if request.stream and request.prompt_logprobs is not None:
            raise ConfigurationError("prompt_logprobs: are not streamed; leave out stream")
        if request.stream and request.hands_out:
            raise ConfigurationError(
                "stream: with do_remote_decode there is no answer to stream; leave it out"
            )
        return request

    @property
    def completions(self) -> int:
        """The number of completions: `n` for each prompt."""
        return 1 if self.n is None else max(1, self.n)

    def max_logprobs(self, longest: int) -> int:
        """Returns the most log probabilities that the answer may hold.

        Args:
            longest: the length of the longest sequence of prompt and answer.
        """
        of_prompts = of_answers = 0
        if (top := self.top_of_prompt) is not None:
            of_prompts = self.max_prompt_tokens(longest) * (1 + max(0, top))
        if (top := self.top_of_answer) is not None:
            each = longest if self.length is None else min(longest, max(0, self.length))
            of_answers = self.completions * each * (1 + max(0, top))
        return of_prompts + of_answers

    def max_prompt_tokens(self, longest: int) -> int:
        """Returns the most tokens that all prompts of this request together may have."""
        raise NotImplementedError

    @property
    def length(self) -> int | None:
        """The most tokens of an answer; ``None`` if the request gives no limit."""
        given = self.max_completion_tokens
        return self.max_tokens if given is None else given

    @property
    def top_of_answer(self) -> int | None:
        """The number of likeliest tokens per answer token; ``None``: no log probabilities."""
        raise NotImplementedError

    @property
    def top_of_prompt(self) -> int | None:
        """The number of likeliest tokens per prompt token; ``None``: no log probabilities."""
        return self.prompt_logprobs

    def submit(self, llm: LLM, headers: Mapping[str, str]) -> list[RequestHandle]:
        """Starts it, one handle for each prompt; blocks while text becomes tokens.

        Args:
            llm: answers.
            headers: of HTTP; they may name the client's trace.

        Raises:
            ConfigurationError: a prompt or a parameter is wrong; none was started.
            EngineClosed: the engine accepts no more requests; none was started.
        """
        raise NotImplementedError

    @property
    def hands_out(self) -> bool:
        """Returns whether its prompt is only computed for another server, without generating."""
        return self.kv_transfer_params is not None and self.kv_transfer_params.do_remote_decode

    def sampling(self, **more: object) -> SamplingParams:
        """Returns its sampling parameters; values in `more`, unless ``None``, override fields."""
        names = SamplingParams.model_fields.keys() & type(self).model_fields.keys()
        given = {name: getattr(self, name) for name in names} | {
            "max_tokens": self.length,
            "logprobs": self.top_of_answer,
            "prompt_logprobs": self.top_of_prompt,
        }
        given |= more
        fields: dict[str, Any] = {"temperature": 1.0}
        fields |= {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**fields)

    def start(
        self, llm: LLM, prompts: Sequence[Any], params: SamplingParams, headers: Mapping[str, str]
    ) -> list[RequestHandle]:
        """Starts all of `prompts`, or none."""
        carried = None
        if self.kv_transfer_params is not None:
            if len(prompts) > 1:
                raise ConfigurationError(
                    f"prompt: {len(prompts)} prompts; with kv_transfer_params send one of them"
                )
            carried = self.kv_transfer_params.for_engine()
        if self.hands_out:
            # Refused here like at the decode server, with the length that the client gave.
            prompts = [llm.fitting(one, params) for one in prompts]
            params = SamplingParams(max_tokens=0)
        handles: list[RequestHandle] = []
        try:
            for prompt in prompts:
                handles.append(  # noqa: PERF401  what was started is to be aborted
                    llm.submit(
                        prompt,
                        params,
                        cache_salt=self.cache_salt,
                        kv_transfer_params=carried,
                        cache=self.kvconnect,
                        trace_headers=headers,
                    )
                )
        except BaseException:
            for handle in handles:
                handle.abort()
            raise
        return handles
