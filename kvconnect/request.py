"""A request, as scheduler, block manager and connectors see it."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, overload

import numpy as np

from kvconnect.cache_options import CacheOptions
from kvconnect.config import KvCacheRetentionConfig
from kvconnect.errors import ConfigurationError
from kvconnect.explain.account import PromptAccount
from kvconnect.keys import BlockKey, KeyChain, Namespace
from kvconnect.sampling_params import SamplingParams
from kvconnect.tokens import LateTokens, TokenArray, TokenBuffer

__all__ = [
    "ExternalMatch",
    "ExternalMatcher",
    "LlmRequest",
    "RequestState",
    "SamplingParams",
    "ScheduledBatch",
]


class RequestState(Enum):
    """The state of a request."""

    QUEUED = "queued"  # holds no blocks
    LOADING = "loading"  # holds blocks; a background load fills them
    CONTEXT = "context"  # its prompt is being computed
    GENERATION = "generation"
    SAVING = "saving"  # finished; its blocks are kept until they are saved
    FINISHED = "finished"  # finished; holds no blocks


_GREEDY = SamplingParams()
_NO_NAMESPACE = Namespace()
_USUAL = CacheOptions()
_NO_TOKENS: TokenArray = np.empty(0, np.int32)


class LlmRequest:
    """A request on its way through the engine. Owned by the engine's thread.

    Attributes:
        request_id: unique within the engine.
        tokens: prompt, then generated tokens.
        prompt_len: tokens of the prompt as it was given.
        num_computed_tokens: leading tokens whose KV is valid on the device.
        num_scheduled_tokens: tokens that this step computes.
        num_external_tokens: leading tokens that a load of this step will have made valid; counts
            from 0 and is at least `num_computed_tokens` while a load is pending, else 0.
        load_end: the end of the tokens that a load brings from their last one on, while the tokens
            before them are computed; 0: there is no such load.
        loaded_from: the load has brought the tokens from here to `load_end`, on every rank.
        load_head: the load has also brought the tokens before here, except computed ones, on every
            rank; 0: none.
        load_follows: another engine may still compute the tokens of the load.
        load_floor: the end of the block in which the tokens computed beside the load end, or 0.
            Computing zeroes the rest of that block, so that what a load brought of it is lost.
        load_times: when its load came how far: positions, and seconds since the load's start. The
            engine empties the list.
        draft_tokens: proposed tokens to verify in this step.
        kv_transfer_params: free-form data that travels with a request between instances.
        cache: its use of stores; `retention` has the worth of its blocks.
        reused_device_tokens, reused_store_tokens, computed_tokens: what its prompt cost so far.
        reused_host_tokens: those of `reused_device_tokens` that the host tier brought back.
        loads_alone: nothing is expected to be computed beside the load.
        lookup_late: the store had not answered the lookup when the request was admitted.
        account: the outcome of each token of its prompt.
        num_connector_matched_tokens: tokens of the connector's match that this admission takes; 0:
            none of them may be loaded. Set before `update_state_after_alloc`.
        is_finished: its generation ended, or was aborted; set before `request_finished`.
        is_finished_normal: it ended by itself.
        multimodal_positions: positions of inputs that are no text; there are none.
    """

    multimodal_positions: Sequence[int] | None = None

    def __init__(
        self,
        request_id: int,
        tokens: TokenArray | LateTokens,
        *,
        chain_root: BlockKey,
        tokens_per_block: int,
        sampling_params: SamplingParams | None = None,
        namespace: Namespace | None = None,
        retention: KvCacheRetentionConfig | None = None,
        kv_transfer_params: dict[str, Any] | None = None,
        cache: CacheOptions | None = None,
    ) -> None:
        if len(tokens) == 0:
            raise ConfigurationError("prompt: at least one token is needed")
        self.request_id = request_id
        self.tokens = TokenBuffer(tokens)
        self.prompt_len = len(tokens)
        self.account = PromptAccount(len(tokens))
        self.sampling_params = sampling_params or _GREEDY
        self.namespace = namespace or _NO_NAMESPACE
        self.retention = retention
        self.kv_transfer_params = kv_transfer_params
        self.cache = cache or _USUAL
        self.key_chain = KeyChain(chain_root, tokens_per_block, self.tokens)
        self.state = RequestState.QUEUED
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_external_tokens = 0
        self.load_end = 0
        self.loaded_from = 0
        self.load_floor = 0
        self.load_head = 0
        self.load_follows = False
        self.loads_alone = False
        self.load_times: list[tuple[int, float]] = []
        self.draft_tokens = _NO_TOKENS
        self.arrived_at = time.perf_counter()
        self.reused_device_tokens = 0
        self.reused_store_tokens = 0
        self.reused_host_tokens = 0
        self.lookup_late = False
        self.computed_tokens = 0
        self.num_connector_matched_tokens = 0
        self.is_finished = False
        self.is_finished_normal = False

    @property
    def cache_salt(self) -> str | None:
        """The tenant's salt."""
        return self.namespace.cache_salt

    @property
    def lora_id(self) -> int | str | None:
        """The adapter."""
        return self.namespace.lora_id

    @property
    def extra_key(self) -> str | int | None:
        """The value of any other field that separates namespaces."""
        return self.namespace.extra_key

    @property
    def joins_load_at(self) -> int:
        """The computed tokens from which on loaded tokens are valid, too: those up to `load_end`.

        If the load has brought tokens up to `load_head`, these are valid first.
        """
        if self.load_head > self.load_floor > self.num_computed_tokens:
            return self.load_floor
        return max(self.loaded_from, min(self.load_floor, self.load_end))

    def lose_blocks(self) -> None:
        """Returns to the queue: it holds no blocks, and is admitted anew."""
        self.state = RequestState.QUEUED
        self.num_computed_tokens = self.num_external_tokens = self.num_scheduled_tokens = 0
        self.draft_tokens = _NO_TOKENS
        self.forget_load()

    def forget_load(self) -> None:
        """Removes what is known of a load that ran beside its computing."""
        self.load_end = self.loaded_from = self.load_floor = self.load_head = 0
        self.load_follows = False

    @property
    def may_reuse(self) -> bool:
        """Returns whether cached KV may replace prompt tokens: none of their logits are wanted."""
        return self.sampling_params.prompt_logprobs is None

    @property
    def num_tokens(self) -> int:
        """The number of prompt and generated tokens so far."""
        return len(self.tokens)

    @property
    def num_generated_tokens(self) -> int:
        """The number of tokens sampled so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def context_current_position(self) -> int:
        """The number of leading context tokens whose KV is valid or being loaded from a store.

        The context is the prompt, and after a preemption also the tokens generated before it.
        """
        present = max(self.num_computed_tokens, self.num_external_tokens)
        context = self.state in {RequestState.CONTEXT, RequestState.LOADING, RequestState.QUEUED}
        return present if context else min(present, self.prompt_len)

    @overload
    def get_tokens(self) -> list[list[int]]: ...

    @overload
    def get_tokens(self, beam: int) -> list[int]: ...

    def get_tokens(self, beam: int | None = None) -> list[int] | list[list[int]]:
        """Returns a new list of all tokens of `beam`; without `beam`, a list of such lists.

        Raises:
            ConfigurationError: `beam` is not 0; a request has one beam.
        """
        if beam not in {None, 0}:
            raise ConfigurationError(f"beam: {beam} does not exist; there is only beam 0")
        tokens: list[int] = self.tokens.view.tolist()
        return [tokens] if beam is None else tokens

    def block_keys(self, start: int = 0, stop: int | None = None) -> Sequence[BlockKey]:
        """Returns the keys of the full blocks of the tokens so far, hashed lazily and once."""
        return self.key_chain.keys(start, stop)

    def append_tokens(self, tokens: TokenArray) -> None:
        """Appends sampled tokens."""
        self.tokens.extend(tokens)

    def rewind(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` tokens, and the keys of the full blocks among them."""
        self.tokens.truncate(num_tokens)
        self.key_chain.truncate(num_tokens)

    def note_end(self, reason: str) -> None:
        """Notes why its answer is complete, for traces; does nothing where none are made."""

    def __repr__(self) -> str:
        return (
            f"LlmRequest({self.request_id}, {self.state.value}, tokens={self.num_tokens}, "
            f"prompt={self.prompt_len}, computed={self.num_computed_tokens})"
        )


@dataclass(slots=True)
class ScheduledBatch:
    """The requests of one step.

    `KVCacheManager.prepare_resources` moves requests out of `context_requests`: those that load in
    the background to `loading_requests`, those that do not fit to `refused_requests`, and those
    whose load waits for other loads to `deferred_requests`. It does not change refused and deferred
    requests; other requests may overtake the deferred ones. Every request that remains has its
    blocks afterwards.
    """

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)
    loading_requests: list[LlmRequest] = field(default_factory=list)
    refused_requests: list[LlmRequest] = field(default_factory=list)
    deferred_requests: list[LlmRequest] = field(default_factory=list)

    @property
    def requests(self) -> list[LlmRequest]:
        """The requests that compute in this step, context first."""
        return self.context_requests + self.generation_requests

    def drop(self, request_ids: Container[int]) -> None:
        """Removes ended requests: none of them is computed or loaded."""
        for requests in (self.context_requests, self.generation_requests, self.loading_requests):
            requests[:] = [one for one in requests if one.request_id not in request_ids]


@dataclass(frozen=True, slots=True)
class ExternalMatch:
    """The tokens that a connector can load: `num_tokens` from `position` on.

    Attributes:
        position: the end of the device match that is kept, at a block boundary.
        num_tokens: tokens to load beyond `position`; 0: none.
        is_async: the load runs in the background, not within this step.
        overlaps: the load runs in the background, from the last token towards the first; the engine
            computes the tokens before meanwhile.
        follows: the load `overlaps`, and another engine may still compute its tokens.
        deferred: the load can start once other loads have ended; the caller asks again in a later
            step, or computes the tokens.
    """

    position: int = 0
    num_tokens: int = 0
    is_async: bool = False
    overlaps: bool = False
    follows: bool = False
    deferred: bool = False

    @property
    def end(self) -> int:
        """The number of leading tokens that are valid after the load."""
        return self.position + self.num_tokens


class ExternalMatcher(Protocol):
    """The matcher that `KVCacheManager.prepare_resources` asks, such as the connector manager."""

    def match_external(self, request: LlmRequest, num_device_tokens: int) -> ExternalMatch:
        """Returns the match of the store beyond the device match, at a block boundary.

        ``num_tokens`` is 0 unless ``end > num_device_tokens``. A caller that loads the match keeps
        only ``position`` tokens of the device match.
        """

    def blocks_allocated(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Reports the blocks of `request` in group 0, in order of its tokens."""
