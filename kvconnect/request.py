"""A request, as scheduler, block manager and connectors see it."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, overload

import numpy as np

from kvconnect.config import KvCacheRetentionConfig
from kvconnect.errors import ConfigurationError
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
    """Where a request is in its life."""

    QUEUED = "queued"  # holds no blocks
    LOADING = "loading"  # holds blocks; a background load fills them
    CONTEXT = "context"  # its prompt is being computed
    GENERATION = "generation"
    SAVING = "saving"  # finished; its blocks are kept until they are saved
    FINISHED = "finished"  # holds no blocks, for good


_GREEDY = SamplingParams()
_NO_NAMESPACE = Namespace()
_NO_TOKENS: TokenArray = np.empty(0, np.int32)


class LlmRequest:
    """One request on its way through the engine. Owned by the engine's thread.

    Attributes:
        request_id: unique within the engine.
        tokens: prompt, then generated tokens.
        prompt_len: tokens of the prompt as it was given.
        num_computed_tokens: leading tokens whose KV is valid on the device.
        num_scheduled_tokens: tokens that this step computes.
        num_external_tokens: leading tokens that a load of this step will have made valid; counts
            from 0 and is at least `num_computed_tokens` while a load is pending, else 0.
        draft_tokens: proposed tokens to verify in this step.
        kv_transfer_params: free-form data that travels with a request between instances.
        reused_device_tokens, reused_store_tokens, computed_tokens: what its prompt cost so far.
        reused_host_tokens: those of `reused_device_tokens` that the host tier brought back.
        lookup_late: the connector had no answer of its store when the request was admitted.
        num_connector_matched_tokens: what of the connector's offer this admission takes; 0: the
            offer was dropped, and nothing of it may be loaded. Set before
            `update_state_after_alloc`.
        is_finished: its generation ended, or was aborted; set before `request_finished`.
        is_finished_normal: it ended by itself.
        multimodal_positions: where inputs that are no text stand; there are none.
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
    ) -> None:
        if len(tokens) == 0:
            raise ConfigurationError("prompt: at least one token is needed")
        self.request_id = request_id
        self.tokens = TokenBuffer(tokens)
        self.prompt_len = len(tokens)
        self.sampling_params = sampling_params or _GREEDY
        self.namespace = namespace or _NO_NAMESPACE
        self.retention = retention
        self.kv_transfer_params = kv_transfer_params
        self.key_chain = KeyChain(chain_root, tokens_per_block, self.tokens)
        self.state = RequestState.QUEUED
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_external_tokens = 0
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
        """Anything else that separates namespaces."""
        return self.namespace.extra_key

    @property
    def may_reuse(self) -> bool:
        """True if cached KV may stand for prompt tokens; False if their own logits are wanted."""
        return self.sampling_params.prompt_logprobs is None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.tokens)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def context_current_position(self) -> int:
        """Leading tokens of the context whose KV is there, or on its way from a store.

        The context is the prompt, and after a preemption also what was generated before it.
        """
        present = max(self.num_computed_tokens, self.num_external_tokens)
        context = self.state in {RequestState.CONTEXT, RequestState.LOADING, RequestState.QUEUED}
        return present if context else min(present, self.prompt_len)

    @overload
    def get_tokens(self) -> list[list[int]]: ...

    @overload
    def get_tokens(self, beam: int) -> list[int]: ...

    def get_tokens(self, beam: int | None = None) -> list[int] | list[list[int]]:
        """Returns all tokens so far as a new list: of one beam, or without `beam` a list of each.

        Raises:
            ConfigurationError: `beam` is not 0; there is no other.
        """
        if beam not in {None, 0}:
            raise ConfigurationError(f"beam: {beam} does not exist; there is only beam 0")
        tokens: list[int] = self.tokens.view.tolist()
        return [tokens] if beam is None else tokens

    def block_keys(self, start: int = 0, stop: int | None = None) -> Sequence[BlockKey]:
        """Keys of the full blocks of the tokens so far, hashed lazily and once."""
        return self.key_chain.keys(start, stop)

    def append_tokens(self, tokens: TokenArray) -> None:
        """Add sampled tokens."""
        self.tokens.extend(tokens)

    def rewind(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, and the keys of the full blocks among them."""
        self.tokens.truncate(num_tokens)
        self.key_chain.truncate(num_tokens)

    def __repr__(self) -> str:
        return (
            f"LlmRequest({self.request_id}, {self.state.value}, tokens={self.num_tokens}, "
            f"prompt={self.prompt_len}, computed={self.num_computed_tokens})"
        )


@dataclass(slots=True)
class ScheduledBatch:
    """What one step works on.

    `KVCacheManager.prepare_resources` moves requests of `context_requests` that load in the
    background to `loading_requests`, those that do not fit after all to `refused_requests`, and
    those whose load has to wait for other loads to `deferred_requests` (nothing changed for either;
    others may pass the deferred ones). Of the rest every one has its blocks when it returns.
    """

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)
    loading_requests: list[LlmRequest] = field(default_factory=list)
    refused_requests: list[LlmRequest] = field(default_factory=list)
    deferred_requests: list[LlmRequest] = field(default_factory=list)

    @property
    def requests(self) -> list[LlmRequest]:
        """Those that compute in this step, context first."""
        return self.context_requests + self.generation_requests

    def drop(self, request_ids: Container[int]) -> None:
        """Those of `request_ids` ended: nothing of them is computed or loaded."""
        for requests in (self.context_requests, self.generation_requests, self.loading_requests):
            requests[:] = [one for one in requests if one.request_id not in request_ids]


@dataclass(frozen=True, slots=True)
class ExternalMatch:
    """What a connector supplies: `num_tokens` beyond `position`, in this step or the background.

    Attributes:
        position: tokens of the device match that are kept, a block boundary.
        num_tokens: beyond it; 0: nothing.
        is_async: in the background.
        deferred: it could, once other loads have ended: ask again in a later step. An admission
            that does not wait computes instead.
    """

    position: int = 0
    num_tokens: int = 0
    is_async: bool = False
    deferred: bool = False

    @property
    def end(self) -> int:
        """Leading tokens that are valid once it is loaded."""
        return self.position + self.num_tokens


class ExternalMatcher(Protocol):
    """Whom `KVCacheManager.prepare_resources` asks at admission; the connector manager is one."""

    def match_external(self, request: LlmRequest, num_device_tokens: int) -> ExternalMatch:
        """What the store has beyond the device match, asked for at a block boundary.

        ``num_tokens`` is 0 unless ``end > num_device_tokens``. When it is taken, the caller keeps
        only ``position`` tokens of the device match.
        """

    def blocks_allocated(
        self, request: LlmRequest, block_ids: list[int], by_group: Sequence[list[int]]
    ) -> None:
        """`request` now holds `block_ids`, in order of its tokens; `by_group` in each pool group.

        -1 in `by_group` is a place outside the group's window; places at the end that are not
        reserved yet are left off.
        """
