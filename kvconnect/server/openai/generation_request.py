"""What completions and chats have in common, as clients ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, StrictBool, StrictInt

from kvconnect.engine.llm import LLM
from kvconnect.engine.request.handle import RequestHandle
from kvconnect.errors import ConfigurationError
from kvconnect.keys import check_salt
from kvconnect.request import SamplingParams
from kvconnect.server.openai.answer import Answer
from kvconnect.server.openai.kv_transfer import KvTransferParams
from kvconnect.settings import Settings
from kvconnect.text import shown

__all__ = ["GenerationRequest", "Integer", "StreamOptions"]

_MAX_STOPS = 64
_MAX_STOP_TOKENS = 1024

_IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls", "request_id"),
    }
)
"""Fields of OpenAI's API that change no token."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
"""Fields of OpenAI's API that are not served, and what of them asks for nothing."""

_SAMPLING = (
    *("n", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "stop_token_ids"),
)

Stop = Annotated[str, Field(min_length=1, max_length=1000)]


def _number(given: object) -> object:
    # Pydantic would take `true` for 1, and "1" as well.
    if isinstance(given, (bool, str)):
        raise ValueError("must be a number")  # noqa: TRY004  pydantic's kind
    return given


Integer = Annotated[int, BeforeValidator(_number)]
Real = Annotated[float, BeforeValidator(_number)]


class StreamOptions(Settings):
    """How a stream is told.

    Attributes:
        include_usage: a last chunk without choices has the counts of tokens.
        include_obfuscation: accepted, without effect.
    """

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False


class GenerationRequest(Settings):
    """Fields of both kinds of requests. Names are OpenAI's and, beyond those, vLLM's.

    ``None`` is the same as leaving a field out. What each sampling parameter means says
    `SamplingParams`; the default temperature is OpenAI's, 1.

    Attributes:
        model: name of the model that is asked; ``None``: the one that is served.
        stream: answer with server-sent events.
        stream_options: how.
        cache_salt: 1 to 1,024 characters; requests share cached blocks only if theirs is equal.
        kv_transfer_params: from a router: hand out the prompt and generate nothing, or fetch it.
    """

    model: str | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    kv_transfer_params: KvTransferParams | None = None
    n: Integer | None = None
    max_tokens: Integer | None = None
    min_tokens: Integer | None = None
    temperature: Real | None = None
    top_k: Integer | None = None
    top_p: Real | None = None
    seed: Integer | None = None
    presence_penalty: Real | None = None
    frequency_penalty: Real | None = None
    repetition_penalty: Real | None = None
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=_MAX_STOPS)] | None = None
    stop_token_ids: (
        Annotated[list[StrictInt], Field(fail_fast=True, max_length=_MAX_STOP_TOKENS)] | None
    ) = None
    ignore_eos: StrictBool | None = None

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """The request that `body`, parsed JSON, asks for.

        Raises:
            ConfigurationError: a field is unknown, wrong, or asks for what is not served.
        """
        check_salt(body.get("cache_salt"))
        for name, neutral in _NEUTRAL.items():
            value = body.get(name)
            if value is not None and value not in neutral:
                raise ConfigurationError(f"{name}: {shown(value)} is not served; leave it out")
        fields = {
            name: value
            for name, value in body.items()
            if value is not None and name not in _IGNORED and name not in _NEUTRAL
        }
        request = cls(**fields)
        if request.stream and request.hands_out:
            raise ConfigurationError(
                "stream: a prompt that is handed out has no answer to stream; leave it out"
            )
        return request

    @property
    def completions(self) -> int:
        """How many come out of it."""
        raise NotImplementedError

    def submit(self, llm: LLM) -> list[RequestHandle]:
        """Start it, one handle for each prompt; blocks while text becomes tokens.

        Raises:
            ConfigurationError: a prompt or a parameter is wrong; nothing runs.
            EngineClosed: the engine takes no more requests; nothing runs.
        """
        raise NotImplementedError

    def answer(self, model: str) -> Answer:
        """What will come out of it, as JSON objects; `model` is what clients call the model."""
        raise NotImplementedError

    @property
    def hands_out(self) -> bool:
        """Whether its prompt is computed for another server, and nothing generated."""
        return self.kv_transfer_params is not None and self.kv_transfer_params.do_remote_decode

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, **more: object) -> SamplingParams:
        """How to go on from its prompts; `more` are fields of `SamplingParams`, unless ``None``."""
        given = {name: getattr(self, name) for name in _SAMPLING} | more
        fields: dict[str, Any] = {"temperature": 1.0}
        fields |= {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**fields)

    def start(
        self, llm: LLM, prompts: Sequence[Any], params: SamplingParams
    ) -> list[RequestHandle]:
        """Start each of `prompts`; all or none."""
        carried = None
        if self.kv_transfer_params is not None:
            if len(prompts) > 1:
                raise ConfigurationError(
                    f"prompt: {len(prompts)} prompts; with kv_transfer_params send one of them"
                )
            carried = self.kv_transfer_params.for_engine()
        if self.hands_out:
            params = SamplingParams(max_tokens=0)
        handles: list[RequestHandle] = []
        try:
            for prompt in prompts:
                handles.append(  # noqa: PERF401  what was started is to be aborted
                    llm.submit(
                        prompt, params, cache_salt=self.cache_salt, kv_transfer_params=carried
                    )
                )
        except BaseException:
            for handle in handles:
                handle.abort()
            raise
        return handles
