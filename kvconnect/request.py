"""A request, as scheduler, block manager and connectors see it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, Protocol

import numpy as np
from pydantic import Field

from kvconnect.config import KvCacheRetentionConfig, Settings
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey, KeyChain, Namespace
from kvconnect.tokens import TokenArray, TokenBuffer

__all__ = [
    "ExternalMatch",
    "ExternalMatcher",
    "LlmRequest",
    "RequestState",
    "SamplingParams",
    "ScheduledBatch",
]


class SamplingParams(Settings):
    """How tokens are chosen and when generation stops.

    Attributes:
        max_tokens: generate at most so many.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0: all.
        top_p: keep the likeliest tokens that together reach this probability.
        seed: equal seeds give equal samples, whatever else runs in the batch.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: tokens that end it, besides the model's own.
        ignore_eos: go on past the model's end-of-sequence tokens.
    """

    max_tokens: Annotated[int, Field(ge=1)] = 16
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    top_k: Annotated[int, Field(ge=0)] = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int | None = None
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


class RequestState(Enum):
    """Where a request is in its life."""

    QUEUED = "queued"  # holds no blocks
    LOADING = "loading"  # holds blocks; a background load fills them
    CONTEXT = "context"  # its prompt is being computed
    GENERATION = "generation"
    SAVING = "saving"  # finished; its blocks are kept until they are saved
    FINISHED = "finished"  # holds no blocks, for good


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
    """

    def __init__(
        self,
        request_id: int,
        tokens: TokenArray,
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
        self.sampling_params = sampling_params or SamplingParams()
        self.namespace = namespace or Namespace()
        self.retention = retention
        self.kv_transfer_params = kv_transfer_params
        self.key_chain = KeyChain(chain_root, tokens_per_block, self.tokens)
        self.state = RequestState.QUEUED
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_external_tokens = 0
        self.draft_tokens: TokenArray = np.empty(0, np.int32)
        self.arrived_at = time.perf_counter()
        self.reused_device_tokens = 0
        self.reused_store_tokens = 0
        self.reused_host_tokens = 0
        self.computed_tokens = 0

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
    def num_tokens(self) -> int:
        """Prompt and generated tokens so far."""
        return len(self.tokens)

    @property
    def num_generated_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_len

    def get_tokens(self, beam: int = 0) -> list[int]:
        """All tokens so far, as a new list. There is one beam."""
        if beam != 0:
            raise ConfigurationError(f"beam: {beam} does not exist; there is only beam 0")
        return [int(token) for token in self.tokens.view]

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
    background to `loading_requests`, and those that do not fit after all to `refused_requests`
    (nothing changed for them). Of the others every one has its blocks when it returns.
    """

    context_requests: list[LlmRequest] = field(default_factory=list)
    generation_requests: list[LlmRequest] = field(default_factory=list)
    loading_requests: list[LlmRequest] = field(default_factory=list)
    refused_requests: list[LlmRequest] = field(default_factory=list)

    @property
    def requests(self) -> list[LlmRequest]:
        """Those that compute in this step, context first."""
        return self.context_requests + self.generation_requests


@dataclass(frozen=True, slots=True)
class ExternalMatch:
    """What a connector supplies: `num_tokens` beyond `position`, in this step or the background."""

    position: int = 0
    num_tokens: int = 0
    is_async: bool = False

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
