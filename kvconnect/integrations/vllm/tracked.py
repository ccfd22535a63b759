"""The state of a live request in the scheduler's half."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvconnect.digest.doubts import Doubt
from kvconnect.errors import UsageError
from kvconnect.integrations.core.load_choice import PlannedLoad
from kvconnect.integrations.core.requests import PromptContent
from kvconnect.request import LlmRequest
from kvconnect.tokens import LateTokens, as_token_array

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
