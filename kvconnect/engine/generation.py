"""The methods of an `LLM` that take prompts: batches, chats, single ones, coroutines."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, TypedDict, Unpack

from kvconnect.cache_options import CacheOptions
from kvconnect.config import KvCacheRetentionConfig
from kvconnect.engine.model.model import Model
from kvconnect.engine.options import known_keywords
from kvconnect.engine.request.chat import ChatFormat, Conversation, as_conversations
from kvconnect.engine.request.handle import RequestHandle, Siblings
from kvconnect.engine.request.intake import Intake
from kvconnect.engine.request.live_request import LiveRequest
from kvconnect.engine.request.output import RequestOutput, StreamChunk
from kvconnect.engine.request.prompts import Prompt, as_prompts, one_each
from kvconnect.engine.request.stops import StopChecker
from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.engine.thread import Inbox, Message, post_abort
from kvconnect.errors import ConfigurationError, nearest
from kvconnect.keys import Namespace, check_salt
from kvconnect.request import SamplingParams
from kvconnect.weak import weakly

Params: TypeAlias = SamplingParams | Mapping[str, object]
Retention: TypeAlias = KvCacheRetentionConfig | Mapping[str, object]
Caching: TypeAlias = CacheOptions | Mapping[str, object]


class RequestOptions(TypedDict, total=False):
    """The keyword arguments of `LLM.submit`, which explains them."""

    cache_salt: str | None
    lora_id: int | str | None
    extra_key: str | int | None
    retention: Retention | None
    kv_transfer_params: dict[str, Any] | None
    cache: Caching | None
    trace_headers: Mapping[str, str] | None


class BatchOptions(TypedDict, total=False):
    """The keyword arguments of `LLM.generate`, which explains them."""

    cache_salt: str | Sequence[str | None] | None
    lora_id: int | str | None
    extra_key: str | int | None
    retention: Retention | Sequence[Retention | None] | None
    kv_transfer_params: dict[str, Any] | Sequence[dict[str, Any] | None] | None
    cache: Caching | Sequence[Caching | None] | None
    trace_headers: Mapping[str, str] | None


class ChatOptions(TypedDict, total=False):
    """The keyword arguments of `LLM.chat`; see `ChatFormat`."""

    chat_template: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, object]] | None
    chat_template_kwargs: Mapping[str, object] | None


class Generation:
    """The methods of an `LLM` that take prompts.

    Every method may be called from any thread.

    Attributes:
        tokenizer: the tokenizer of the model; ``None`` if its directory has none.
    """

    tokenizer: Tokenizer | None
    _ids: Iterator[int]
    _intake: Intake
    _model: Model
    _inbox: Inbox[Message]
    _in_use: object

    @known_keywords
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        cache_salt: str | Sequence[str | None] | None = None,
        lora_id: int | str | None = None,
        extra_key: str | int | None = None,
        retention: Retention | Sequence[Retention | None] | None = None,
        kv_transfer_params: dict[str, Any] | Sequence[dict[str, Any] | None] | None = None,
        cache: Caching | Sequence[Caching | None] | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> list[RequestOutput]:
        """Generates completions of `prompts` together; blocks until the last one has ended.

        Args:
            prompts: one or several; one is answered by a list of one. Each is text, token ids, or a
                dict with one of ``prompt`` and ``prompt_token_ids``.
            sampling_params: one for all, or one each; also as a dict.
            cache_salt: 1 to 1,024 characters; requests share cached blocks only if theirs is
                equal; one for all, or a list of one each.
            lora_id: the same for adapters. None is applied: the id only keeps blocks apart.
            extra_key: the same for anything else.
            retention: which blocks are worth keeping; one for all, or a list of one each; also as
                a dict.
            kv_transfer_params: data for the connector that travels with the requests; one for all,
                or a list of one each.
            cache: whether stores are used, and the worth of all blocks of a request in the place of
                `retention`; one for all, or a list of one each; also as a dict.
            trace_headers: ``traceparent`` and ``tracestate`` of the caller's trace, which the spans
                of these requests become a part of; see `kvconnect.otel`.

        Raises:
            ConfigurationError: a prompt or a setting is wrong; no request was started.
            EngineClosed: the engine accepts no more requests, or this process was forked from the
                engine's.
            Exception: the connector's error for one of these requests; the others continue.
            BaseException: the error that stopped the engine, or interrupted the wait (Ctrl-C); the
                requests are aborted.
        """
        several = as_prompts(prompts)
        given: dict[str, Any] = {
            "sampling_params": sampling_params,
            "cache_salt": cache_salt,
            "retention": retention,
            "kv_transfer_params": kv_transfer_params,
            "cache": cache,
        }
        each = [one_each(name, value, len(several)) for name, value in given.items()]
        made = [
            self._make(
                prompt,
                one,
                _namespace(salt, lora_id, extra_key),
                *others,
                trace_headers=trace_headers,
            )
            for prompt, one, salt, *others in zip(several, *each, strict=True)
        ]
        return self._answers(made)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **options: Unpack[BatchOptions],
    ) -> list[RequestOutput]:
        """Generates answers to conversations in the model's chat template; see `generate`.

        Args:
            messages: a conversation, or several: lists of dicts with ``role`` and ``content``.
            sampling_params: as in `generate`, one for all, or one for each conversation.
            chat_template: a Jinja template instead of the model's own.
            add_generation_prompt: end the prompt with the beginning of the model's answer.
            continue_final_message: leave the last message open, so that the answer continues it.
            tools: JSON schemas of functions that the template shows the model.
            chat_template_kwargs: further variables for the template.
            options: further arguments of `generate`.

        Raises:
            ConfigurationError: raised as by `generate`; or the model has no chat template, or the
                template refuses the messages.
        """
        prompts = [
            self.chat_prompt(
                one,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for one in as_conversations(messages)
        ]
        return self.generate(prompts, sampling_params, **options)

    def chat_prompt(self, messages: Conversation, **how: Unpack[ChatOptions]) -> Prompt:
        """Returns the prompt of a conversation, for `submit`, `stream` and `generate_async`.

        Raises:
            ConfigurationError: raised as by `chat`.
        """
        for name in how.keys() - ChatOptions.__annotations__.keys():
            raise ConfigurationError(
                f"{type(self).__name__}.chat_prompt: unknown argument '{name}'; "
                f"{nearest(name, ChatOptions.__annotations__)}"
            )
        most = self._intake.most_prompt_tokens
        return {"prompt_token_ids": ChatFormat(**how).tokens(messages, self.tokenizer, most=most)}

    def fitting(self, prompt: Prompt, sampling_params: Params) -> Prompt:
        """Returns the token ids of `prompt` for `submit`, after checking that they fit.

        Raises:
            ConfigurationError: `submit` would refuse `prompt` with `sampling_params`.
        """
        tokens = self._intake.fitting(prompt, _params(sampling_params))
        return {"prompt_token_ids": tokens}

    @known_keywords
    def submit(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        cache_salt: str | None = None,
        lora_id: int | str | None = None,
        extra_key: str | int | None = None,
        retention: Retention | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        cache: Caching | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> RequestHandle:
        """Starts one request and returns at once; see `generate`.

        Args:
            prompt: text or token ids, or a dict of either.
            sampling_params: how to continue it.
            cache_salt: as in `generate`.
            lora_id: as in `generate`.
            extra_key: as in `generate`.
            retention: as in `generate`.
            kv_transfer_params: data for the connector that travels with the request.
            cache: as in `generate`.
            trace_headers: as in `generate`.

        Raises:
            ConfigurationError: the prompt or a setting is wrong.
            EngineClosed: the engine takes no more requests.
        """
        namespace = _namespace(cache_salt, lora_id, extra_key)
        made = self._make(
            prompt,
            sampling_params,
            namespace,
            retention,
            kv_transfer_params,
            cache,
            trace_headers=trace_headers,
        )
        return self._post(made)

    def generate_async(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestHandle:
        """Starts one request in a coroutine; see `submit`.

        ``await`` the result for the output, or iterate over it with ``async for``. Cancelling the
        ``await``, or leaving the iteration early, aborts the request.
        """
        return self.submit(prompt, sampling_params, **options)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[StreamChunk]:
        """Starts one request and iterates over its output; see `submit`.

        The request starts at once, not with the first ``next``. Leaving the iteration early aborts
        the request.
        """
        handle = self.submit(prompt, sampling_params, **options)
        chunks = _abort_when_left(handle)
        next(chunks)
        return chunks

    def _make(
        self,
        prompt: Prompt,
        sampling_params: Params | None,
        namespace: Namespace,
        retention: Retention | None,
        kv_transfer_params: dict[str, Any] | None,
        cache: Caching | None,
        *,
        trace_headers: Mapping[str, str] | None,
    ) -> list[LiveRequest]:
        self._inbox.owner.check()
        params = _params(sampling_params)
        use = CacheOptions() if cache is None else CacheOptions.given("cache", cache)
        first = self._intake.request(
            next(self._ids),
            prompt,
            params.for_completion(0),
            namespace,
            _retention(retention, use),
            kv_transfer_params,
            use,
            headers=trace_headers,
        )
        requests = [first] + [
            self._intake.another(first, next(self._ids), params.for_completion(index))
            for index in range(1, params.n)
        ]
        eos, tokenizer = self._model.eos_token_ids, self.tokenizer
        return [
            LiveRequest(
                request, StopChecker(params, eos, tokenizer), index=index, tokenizer=tokenizer
            )
            for index, request in enumerate(requests)
        ]

    def _answers(self, made: Sequence[Sequence[LiveRequest]]) -> list[RequestOutput]:
        """Runs all requests, and returns their outputs; aborts the others if one raises."""
        handles: list[RequestHandle] = []
        try:
            for lives in made:
                handles.append(self._post(lives))  # noqa: PERF401  what was posted is to be aborted
            return [handle.result() for handle in handles]
        except BaseException:
            for handle in handles:
                handle.abort()
            raise

    def _post(self, lives: Sequence[LiveRequest]) -> RequestHandle:
        # The handle keeps the engine open, and once it is closed, nothing of it.
        abort = partial(post_abort, weakref.ref(self._inbox))
        siblings = Siblings(lives, weakly(self._inbox.post), abort)
        siblings.start()
        return RequestHandle(lives, siblings.abort, self._in_use)


def _namespace(
    cache_salt: str | None, lora_id: int | str | None, extra_key: str | int | None
) -> Namespace:
    check_salt(cache_salt)
    return Namespace(cache_salt, lora_id, extra_key)


def _retention(given: Retention | None, cache: CacheOptions) -> KvCacheRetentionConfig | None:
    if given is None:
        return cache.retention()
    if cache.retention() is not None:
        raise ConfigurationError(
            "retention, cache: both say how long blocks are worth keeping; give retention, or "
            "cache with priority and ttl"
        )
    return KvCacheRetentionConfig.given("retention", given)


def _params(given: Params | None) -> SamplingParams:
    if given is None:
        return SamplingParams()
    return SamplingParams.given("sampling_params", given)


def _abort_when_left(handle: RequestHandle) -> Iterator[StreamChunk]:
    try:
        # A generator that was never started runs no `finally`, so this function is no generator.
        yield StreamChunk(handle.request_id, (), "", None)
        yield from handle.stream()
    finally:
        handle.abort()
