"""The requests of vLLM: their state in the scheduler's half, and the keys of all their inputs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvconnect.connector.data import LlmArgs
from kvconnect.digest.doubts import Doubt
from kvconnect.errors import ConfigurationError, KvConnectError, UsageError
from kvconnect.integrations.core.adapters import AdapterDigests
from kvconnect.integrations.core.load_choice import PlannedLoad
from kvconnect.integrations.core.requests import PromptContent, RequestMaker
from kvconnect.integrations.vllm.pictures import FeatureDigests
from kvconnect.request import LlmRequest
from kvconnect.tokens import LateTokens, as_token_array
from kvconnect.trace import warn_once

_NO_TOKENS = LateTokens(())


@dataclass(slots=True, eq=False)
class Tracked:
    """A live request of vLLM.

    Attributes:
        request: vLLM's.
        since: the time of its arrival.
        tokens: its tokens at the time when it was added to the pair.
        num_tokens: the number of its tokens that the pair has.
        llm: the pair's, ``None`` while `adapter` or `contents` is being made.
        adapter: the digest of its LoRA adapter.
        contents: its pictures, sounds and videos, or why they have no name.
        preemptions: the number of preemptions that the pair has handled.
        offered_at: its local tokens at the last call for a match.
        found: the stored tokens beyond these, at the last choice whether to load them.
        load: the chosen load; ``None``: the tokens are computed.
        loading: true while a background load runs.
        computed: leading tokens that have KV after the last step it was in.
        num_full: the number of these full blocks that the pair knows.
        num_states: the number of these whose snapshots of states, or their lack, it knows.
        told: leading tokens that a producer reported as saved.
        looked_at: the time of their last lookup.
    """

    request: Any
    since: float
    tokens: LateTokens = _NO_TOKENS
    num_tokens: int = 0
    llm: LlmRequest | None = None
    adapter: Future[str] | None = None
    contents: Future[list[PromptContent] | Doubt] | None = None
    preemptions: int = 0
    offered_at: int = 0
    found: int = 0
    load: PlannedLoad | None = None
    loading: bool = False
    computed: int = 0
    num_full: int = 0
    num_states: int = 0
    told: int = 0
    looked_at: float = 0.0

    @property
    def started(self) -> LlmRequest:
        """The pair's request.

        Raises:
            UsageError: the pair has no request yet.
        """
        if self.llm is None:
            raise UsageError(f"request '{self.request.request_id}' was not given to the pair")
        return self.llm

    def grow(self) -> None:
        """Adds the tokens that vLLM's request has by now to the pair's request."""
        request, known = self.request, self.num_tokens
        now: int = request.num_tokens
        if now > known:
            self.started.append_tokens(as_token_array(request.all_token_ids[known:now]))
            self.num_tokens = now


_LATEST_S = 5.0  # for digests of an adapter and of pictures


@dataclass(frozen=True, slots=True)
class Roles:
    """The actions that ``kv_role`` and the engine allow.

    Attributes:
        saves, loads: a ``kv_consumer`` does not save, a ``kv_producer`` does not load.
        tells: true if results report in ``kv_transfer_params`` how many tokens of the prompt are
            saved.
        base_is_apart: see `caches.base_is_apart`; if not, requests without an adapter are not
            cached.
        features_are_own: outputs of encoders come from this process; if not, pictures are not
            cached.
        producer_timeout_s: how long a request waits for tokens that its producer announced.
    """

    saves: bool = True
    loads: bool = True
    tells: bool = False
    base_is_apart: bool = True
    features_are_own: bool = True
    producer_timeout_s: float = 2.0


class RequestNames:
    """Makes the pair's requests of vLLM's. Does not block; belongs to one thread.

    Args:
        llm_args: the arguments of the pair.
        extra_key: see `kvconnect.integrations.core.requests.extra_key_of`.
        roles: what the engine allows.
    """

    def __init__(self, llm_args: LlmArgs, extra_key: str | None, roles: Roles) -> None:
        self._maker = RequestMaker(llm_args, extra_key)
        self._base_is_apart = roles.base_is_apart
        self._features_are_own = roles.features_are_own
        self._adapters = AdapterDigests()
        self._features = FeatureDigests()

    def separate(self, weights: str) -> None:
        """Adds the name of other weights to all keys from now on."""
        self._maker.separate(weights)

    def begin(self, tracked: Tracked) -> Doubt | None:
        """Starts to compute the digests that the keys of a new request need.

        Called for every new request.

        Returns:
            Why it cannot be cached; ``None`` means that `make` decides.
        """
        request = tracked.request
        if (lora := getattr(request, "lora_request", None)) is not None:
            # Also if the request is not cached: its adapter may replace another.
            tracked.adapter = self.adapter_loads(lora)
        if features := getattr(request, "mm_features", None):
            tracked.contents = self._features.start(features)
        if getattr(request, "resumable", False):
            # vLLM adds pictures to it that no connector can see.
            self._features_are_own = False
        if (doubt := _doubt_of(request)) is not None:
            return doubt
        if features and not self._features_are_own:
            return Doubt.CONTENT_UNKNOWN
        if lora is None:
            return None if self._base_is_apart else Doubt.ADAPTER_MIXED
        return Doubt.ADAPTER_UNKNOWN if tracked.adapter is None else None

    def adapter_loads(self, lora: Any) -> Future[str] | None:
        """Records that vLLM loads an adapter now, unless it has one of this number.

        Args:
            lora: vLLM's ``LoRARequest``.

        Returns:
            The digest of the adapter's files; ``None``: its content is not known.
        """
        return self._adapters.find(lora.lora_int_id, lora.lora_path)

    def make(self, tracked: Tracked) -> LlmRequest | Doubt | None:
        """Returns the pair's request, why there is none, or ``None`` while digests are computed."""
        request = tracked.request
        pending = [one for one in (tracked.adapter, tracked.contents) if one is not None]
        if not all(one.done() for one in pending):
            return Doubt.SLOW_CONTENT if time.monotonic() - tracked.since > _LATEST_S else None
        adapter: str | None = None
        if tracked.adapter is not None:
            error = tracked.adapter.exception()
            if isinstance(error, KvConnectError):
                warn_once("adapter", f"prompts of a LoRA adapter are not cached: {error}")
                return Doubt.ADAPTER_UNKNOWN
            adapter = tracked.adapter.result()
        contents: list[PromptContent] = []
        if tracked.contents is not None:
            found = tracked.contents.result()
            if isinstance(found, Doubt):
                return found
            contents = found
        tracked.tokens = LateTokens(_tokens_of(request))
        try:
            return self._maker.make(
                tracked.tokens,
                cache_salt=request.cache_salt,
                adapter=adapter,
                contents=contents,
            )
        except ConfigurationError:  # which shows the salt
            return Doubt.BAD_SALT

    def close(self) -> None:
        """Ends threads. Idempotent."""
        self._adapters.close()
        self._features.close()


def _doubt_of(request: Any) -> Doubt | None:
    """Returns why `request` cannot be cached, whatever its contents are; ``None`` if it can."""
    if getattr(request, "prompt_embeds", None) is not None:
        return Doubt.EMBEDDINGS
    if request.prompt_token_ids is None or getattr(request, "prompt_is_token_ids", None):
        return Doubt.EMBEDDINGS
    if getattr(request, "resumable", False):
        return Doubt.STREAMING
    adapter = getattr(request, "lora_request", None)
    if adapter is not None and getattr(adapter, "load_inplace", False):
        return Doubt.ADAPTER_UNKNOWN
    return None


def _tokens_of(request: Any) -> Sequence[int]:
    """Returns all tokens of `request`, not to be changed; for a new one its prompt, uncopied."""
    prompt: Sequence[int] = request.prompt_token_ids
    known: int = request.num_tokens
    return prompt if len(prompt) == known else request.all_token_ids[:known]
