"""Turns a prompt into a request: converts it once, and refuses one that can never run."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from kvconnect.cache_options import CacheOptions
from kvconnect.config import KvCacheRetentionConfig
from kvconnect.engine.model.model import Model
from kvconnect.engine.request.prompts import Prompt, as_text_or_tokens
from kvconnect.engine.request.tokenizer import Tokenizer
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Namespace, root_key
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest, SamplingParams
from kvconnect.text import check_text, shown
from kvconnect.tokens import TokenArray, Tokens, as_token_array
from kvconnect.trace import metrics, trace_headers
from kvconnect.traced_request import TracedRequest

_log = logging.getLogger(__name__)

_MOST_TOKENS = 1 << 40  # more than any cache holds


class Intake:
    """Makes requests for one model and cache. May be used from several threads.

    Args:
        model: the model.
        tokenizer: its tokenizer; ``None``: prompts are token ids.
        layouts: the layouts of the pools, as they are in keys.
        model_digest: the digest of the model in keys.
        max_blocks: the blocks of the cache, if it has one pool of full attention.
        could_hold: returns whether the empty cache can run a request of so many prompt tokens and
            ``max_tokens``; asked if there are several pools, or windows.
        max_logprobs: the most log probabilities of a token; -1: all.
        max_prompt: the most tokens of a prompt; ``None``: no limit.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None,
        layouts: Sequence[KvCacheLayout],
        model_digest: bytes,
        max_blocks: int,
        *,
        could_hold: Callable[[int, int], bool],
        max_logprobs: int = -1,
        max_prompt: int | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._layouts = layouts
        self._tokens_per_block = layouts[0].tokens_per_block
        self._digest = model_digest
        self._max_blocks = max_blocks
        self._could_hold = could_hold
        self._max_logprobs = max_logprobs
        self._max_prompt = max_prompt
        self._said_no_adapter = False

    def request(
        self,
        request_id: int,
        prompt: Prompt,
        params: SamplingParams,
        namespace: Namespace,
        retention: KvCacheRetentionConfig | None,
        kv_transfer_params: dict[str, Any] | None,
        cache: CacheOptions | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> LlmRequest:
        """Makes a request in the state QUEUED; `headers` may name the trace that it belongs to.

        The prompt is checked here, on the submitter's thread, because an error in a step of the
        engine would delay other requests.

        Raises:
            ConfigurationError: the prompt is empty, has unknown tokens, or is longer than model or
                cache allow; or a setting is wrong.
        """
        _check_transfer_params(kv_transfer_params)
        if headers is not None and not isinstance(headers, Mapping):
            raise ConfigurationError(
                f"trace_headers: {shown(headers)} is no mapping; give the caller's headers, or None"
            )
        if params.stop and self._tokenizer is None:
            raise ConfigurationError(
                "stop: strings need a tokenizer, which the model's directory lacks; "
                "use stop_token_ids"
            )
        self._check_logprobs("logprobs", params.logprobs)
        self._check_logprobs("prompt_logprobs", params.prompt_logprobs)
        if namespace.lora_id is not None:
            self._say_no_adapter(namespace.lora_id)
        tokens = self.fitting(prompt, params)
        return _made(
            headers,
            request_id,
            tokens,
            chain_root=root_key(self._digest, self._layouts, namespace),
            tokens_per_block=self._tokens_per_block,
            sampling_params=params,
            namespace=namespace,
            retention=retention,
            kv_transfer_params=kv_transfer_params,
            cache=cache,
        )

    def fitting(self, prompt: Prompt, params: SamplingParams) -> TokenArray:
        """Returns the tokens of `prompt`, a copy.

        Raises:
            ConfigurationError: `prompt` is no prompt, or with `params` longer than model or cache
                allow.
        """
        tokens = self._tokens(as_text_or_tokens(prompt))
        self._check_length(len(tokens), params.max_tokens)
        return tokens

    @property
    def max_seq_len(self) -> int:
        """The length of the longest sequence that model and cache allow."""
        limit = self._model.position_limit
        limits = (self._room, None if limit is None else limit.num_tokens)
        known = [one for one in limits if one is not None]
        return min(known, default=self._max_blocks * self._tokens_per_block)

    @property
    def most_prompt_tokens(self) -> int | None:
        """The most tokens that a prompt may have; ``None``: there is no such limit."""
        limit = self._model.position_limit
        limits = (self._max_prompt, None if limit is None else limit.num_tokens, self._room)
        return min((one for one in limits if one is not None), default=None)

    @property
    def _is_one_pool(self) -> bool:
        return len(self._layouts) == 1 and self._layouts[0].window is None

    @cached_property
    def _room(self) -> int | None:
        """The tokens of the longest prompt that the empty cache holds; ``None``: any fits."""
        if self._is_one_pool:
            return self._max_blocks * self._tokens_per_block
        lengths = range(1, _MOST_TOKENS)
        room = bisect_right(lengths, 0, key=lambda length: not self._could_hold(length, 1))
        return None if room == len(lengths) else room

    def another(self, first: LlmRequest, request_id: int, params: SamplingParams) -> LlmRequest:
        """Makes a request like `first`, in the state QUEUED, of the same tokens."""
        return _made(
            first.timeline.headers if isinstance(first, TracedRequest) else None,
            request_id,
            first.tokens.view,
            chain_root=first.key_chain.root,
            tokens_per_block=self._tokens_per_block,
            sampling_params=params,
            namespace=first.namespace,
            retention=first.retention,
            kv_transfer_params=first.kv_transfer_params,
            cache=first.cache,
        )

    def _say_no_adapter(self, lora_id: int | str) -> None:
        if not self._said_no_adapter:
            self._said_no_adapter = True
            _log.warning(
                "lora_id=%r: no adapter is applied, the answers are the model's own; the id only "
                "keeps cached blocks apart (said once)",
                lora_id,
            )

    def _check_logprobs(self, field: str, wanted: int | None) -> None:
        most = self._max_logprobs
        if wanted is None or most == -1 or 0 <= wanted <= most:
            return
        raise ConfigurationError(
            f"{field}: {'all' if wanted == -1 else wanted} are more than max_logprobs={most}; ask "
            "for fewer, or give LLM(max_logprobs=…), -1 for the whole vocabulary"
        )

    def _tokens(self, prompt: str | Tokens) -> TokenArray:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise ConfigurationError(
                    "prompt: text needs a tokenizer, which the model's directory lacks; "
                    "give token ids"
                )
            check_text("prompt", prompt)
            tokens = self._tokenizer.encode(prompt, most=self.most_prompt_tokens)
        elif isinstance(prompt, (bytes, bytearray)) or not hasattr(prompt, "__len__"):
            raise ConfigurationError(
                f"prompt: {shown(prompt)} is a {type(prompt).__name__}; give text or token ids"
            )
        else:
            # A copy, because the caller may change its array.
            tokens = as_token_array(prompt, field="prompt").copy()
        if len(tokens) == 0:
            raise ConfigurationError("prompt: it is empty; at least one token is needed")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self._model.vocab_size:
            raise ConfigurationError(
                f"prompt: token id {low if low < 0 else high} is outside the model's vocabulary "
                f"of {self._model.vocab_size}"
            )
        return tokens

    def _check_length(self, prompt_len: int, max_tokens: int) -> None:
        # The last token is sampled and never fed back: it takes no position and no slot.
        longest = prompt_len + max(max_tokens, 1) - 1
        what = f"prompt: {prompt_len} tokens with max_tokens={max_tokens}"
        if self._max_prompt is not None and prompt_len > self._max_prompt:
            raise ConfigurationError(
                f"prompt: {prompt_len} tokens, and max_num_tokens={self._max_prompt} without "
                f"enable_chunked_prefill; raise max_num_tokens to at least {prompt_len}, set "
                "enable_chunked_prefill=True, or shorten the prompt"
            )
        limit = self._model.position_limit
        if limit is not None and longest > limit.num_tokens:
            raise ConfigurationError(
                f"{what} exceed {limit.num_tokens} positions ({limit.reason}); "
                "shorten the prompt or lower max_tokens"
            )
        if not self._is_one_pool:
            if not self._could_hold(prompt_len, max(max_tokens, 1)):
                raise ConfigurationError(
                    f"{what} need more KV blocks than the pools of the cache have together; a "
                    f"prompt of {self._room} tokens fits. Raise KvCacheConfig.max_tokens, shorten "
                    "the prompt or lower max_tokens"
                )
            return
        size = self._tokens_per_block
        needed = -(-longest // size)
        if needed > self._max_blocks:
            raise ConfigurationError(
                f"{what} need {needed} KV blocks of {size} tokens, the cache has "
                f"{self._max_blocks}; raise KvCacheConfig.max_tokens to at least {needed * size}, "
                "shorten the prompt or lower max_tokens"
            )


def _made(headers: Mapping[str, str] | None, *args: Any, **named: Any) -> LlmRequest:
    """Makes a request; it notes its phases if traces are made."""
    if not metrics.traces:
        return LlmRequest(*args, **named)
    return TracedRequest(*args, headers=trace_headers(headers or {}), **named)


def _check_transfer_params(params: object) -> None:
    if params is None or (isinstance(params, dict) and all(isinstance(key, str) for key in params)):
        return
    raise ConfigurationError(
        f"kv_transfer_params: {shown(params)} is no dict with strings as keys; give one, or None"
    )
