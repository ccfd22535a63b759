"""The stored blocks of prompts: looked up when a request arrives, loaded later."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvconnect.connector.data import LlmArgs, RequestData
from kvconnect.connector.io.budget import LookupBudget
from kvconnect.connector.io.lookup import Hit, Lookup, blocks_needed
from kvconnect.connector.io.open_store import OffloadStore
from kvconnect.connector.io.orders import BlockLoad, LoadBlocks
from kvconnect.errors import ConnectorContractError
from kvconnect.explain.outcome import Outcome
from kvconnect.keys import KeyChain
from kvconnect.request import LlmRequest
from kvconnect.trace import count, warn_once

_LEFT_ALONE: Future[Hit] = Future()
_LEFT_ALONE.set_result(Hit())


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt that is looked up.

    Attributes:
        asked: the keys that are looked up in the store.
        lookup: the lookup in the store, running or answered.
        hit: the answer of the lookup, once it was read.
        promised: the tokens ``start..end`` reported to the runtime for this admission, until their
            load is ordered.
        overlaps: true if their load fills the last block first.
        alone: true if nothing is expected to be computed beside that load.
        asked_at: the time of the first call for the answer, by an engine that repeats the call.
    """

    asked: KeyChain
    lookup: Future[Hit]
    hit: Hit | None = None
    promised: tuple[int, int] | None = None
    overlaps: bool = False
    alone: bool = False
    asked_at: float | None = None


class StoreFinding:
    """The lookups of live requests, and the loads that follow from them.

    Args:
        llm_args: the arguments of the leader.
        whole_blocks: true if hits must end with a block.
        hashes_at_once: true if `begin` computes the keys; otherwise the store's thread does.

    Attributes:
        store: the open store; `close` releases it.
        budget: the budget of the lookups that requests of one step wait for.

    Raises:
        ConfigurationError: the store cannot be opened.
    """

    def __init__(self, llm_args: LlmArgs, *, whole_blocks: bool, hashes_at_once: bool) -> None:
        config = llm_args.kv_connector_config
        self._whole_blocks = whole_blocks
        self._hashes_at_once = hashes_at_once
        self._tokens_per_block = llm_args.tokens_per_block
        self._min_tokens = max(1, config.min_load_tokens)
        self._windows = tuple(layout.window for layout in llm_args.layouts)
        has_states = any(layout.kind == "state" for layout in llm_args.layouts)
        self._only_counts = [has_states and layout.only_counts for layout in llm_args.layouts]
        self._prompts: dict[int, _Prompt] = {}
        self.store = store = OffloadStore.acquire(llm_args)
        self._lookup = Lookup(
            store.backend,
            store.heads,
            whole_blocks=whole_blocks,
            # vLLM, which uses whole blocks only, chooses the ends of snapshots in its own way.
            state_interval=None if whole_blocks else llm_args.kv_cache_config.state_interval,
        )
        self.budget = LookupBudget(config.lookup_timeout_ms / 1000, store.backend, store.io.submit)

    def begin(self, request: LlmRequest, *, may_load: bool = True) -> None:
        """Starts the lookup of `request` if it `may_load`, unless the store's breaker is open."""
        if self._hashes_at_once:
            request.block_keys()
        asked = request.key_chain.snapshot()
        lookup = _LEFT_ALONE
        if not may_load:
            request.account.lose(Outcome.NOT_LOADED, request.num_tokens)
        elif not self.store.backend.available:
            request.account.lose(Outcome.FAILED, request.num_tokens)
        else:
            look_up = partial(self._lookup.find, asked)
            lookup = self.store.io.submit(self.budget.timed(look_up))
        self._prompts[request.request_id] = _Prompt(asked, lookup)

    # ------------------------------------------------------------------ the answer

    def offer(self, request: LlmRequest, num_computed_tokens: int) -> int:
        """Returns the number of stored tokens beyond `num_computed_tokens`.

        Waits for the lookup within the step's budget.
        """
        prompt = self._prompts[request.request_id]
        if prompt.hit is None and self._could_load(request, num_computed_tokens):
            self.budget.wait(prompt.lookup)
        return self._promise(prompt, request, num_computed_tokens)

    def ask(self, request: LlmRequest, num_computed_tokens: int) -> int | Future[Hit]:
        """Returns the result of `offer` without waiting, or the running lookup.

        The lookup is returned while it runs and is within its budget, which begins with the first
        call. The engine then calls again.
        """
        prompt = self._prompts[request.request_id]
        lookup = prompt.lookup
        could_load = self._could_load(request, num_computed_tokens)
        if prompt.hit is None and not lookup.done() and could_load:
            if prompt.asked_at is None:
                prompt.asked_at = time.monotonic()
            if self.budget.leaves_time(prompt.asked_at):
                prompt.promised = None
                return lookup
        return self._promise(prompt, request, num_computed_tokens)

    def overlaps(self, request: LlmRequest) -> bool:
        """Returns whether the load that was reported for `request` can overlap with computing.

        If true, the load's order fills the last block first.
        """
        prompt = self._prompts.get(request.request_id)
        if prompt is None or prompt.promised is None:
            return False
        prompt.overlaps = True
        return True

    def hit(self, request: LlmRequest) -> Hit | None:
        """Returns the store's answer; empty if it failed, ``None`` if it is late. Never waits."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return None
        if prompt.hit is None and prompt.lookup.done():
            request.key_chain.adopt(prompt.asked)
            error = prompt.lookup.exception()
            if error is None:
                prompt.hit = prompt.lookup.result()
                self._note(request, prompt.hit)
            else:
                request.account.lose(Outcome.FAILED, request.num_tokens)
                prompt.hit = Hit()
                count("connector.lookup.failed")
                warn_once("connector.lookup", f"lookup failed, the prompt is computed: {error}")
        return prompt.hit

    @staticmethod
    def _note(request: LlmRequest, hit: Hit) -> None:
        # A late answer still shows how many tokens were missed.
        if request.account.has_lost(Outcome.LATE):
            request.account.lose(Outcome.LATE, hit.end)
        if not request.account.is_explained:
            request.account.divergence = hit.divergence
        if hit.reach > hit.end:
            request.account.lack_states(hit.reach)

    def _could_load(self, request: LlmRequest, num_computed_tokens: int) -> bool:
        # The last token is always computed.
        return request.num_tokens - 1 - num_computed_tokens >= self._min_tokens

    def _promise(self, prompt: _Prompt, request: LlmRequest, num_computed_tokens: int) -> int:
        prompt.promised, prompt.overlaps = None, False
        if not self._could_load(request, num_computed_tokens):
            return 0
        hit = self.hit(request)
        if hit is None:
            count("connector.lookup.late")
            request.lookup_late = True
            request.account.lose(Outcome.LATE, request.num_tokens)
            return 0
        end = self._usable(request, hit, num_computed_tokens)
        num_tokens = end - num_computed_tokens
        if num_tokens < self._min_tokens:
            request.account.lose(Outcome.SLOWER, end)
            return 0
        prompt.promised = (num_computed_tokens, end)
        return num_tokens

    def _usable(self, request: LlmRequest, hit: Hit, num_computed_tokens: int) -> int:
        """Returns the end of the part of `hit` to load: all, whole blocks only, or none (0)."""
        num_tokens, end = request.num_tokens, hit.end
        if end < num_tokens:
            return end
        if end > num_tokens or not self._whole_blocks or any(self._windows):
            return 0  # the request was rewound since: windows were looked up for this end only
        # A load may bring the last token, too, which the engine computes again. If the device has
        # all blocks but the last one, that block is computed.
        size = self._tokens_per_block
        return end - size if end - size <= num_computed_tokens else end

    # ------------------------------------------------------------------ what follows

    def admitted(self, request: LlmRequest) -> None:
        """Drops the match of `request` unless the runtime loads it now."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            return
        prompt.alone = request.loads_alone
        if not request.num_connector_matched_tokens:
            prompt.promised = None

    def order(self, data: RequestData) -> LoadBlocks | None:
        """Returns the load of the tokens that the last `offer` or `ask` of a request reported.

        Returns ``None`` if no match is pending, or if the device has the tokens by now. Each match
        is used once.

        Raises:
            ConnectorContractError: the cache manager reserved no block for a token of the load.
        """
        prompt = self._prompts[data.request_id]
        promised, prompt.promised = prompt.promised, None
        # The runtime drops a match that ends within the device's tokens.
        if promised is None or prompt.hit is None or data.computed_position >= promised[1]:
            return None
        # The device may have kept less than it had matched at the time of the lookup.
        held = data.computed_position - data.computed_position % self._tokens_per_block
        start, end = min(promised[0], held), promised[1]
        blocks = tuple(self._blocks_to_load(data, prompt.hit, start, end))
        # Without windows, in one pool, the leading blocks of a partial load are valid.
        divisible = self._windows == (None,)
        if prompt.overlaps:
            # The last tokens first, in all groups: from each of them on, the load is whole.
            blocks = tuple(sorted(blocks, key=lambda block: block.number, reverse=True))
        return LoadBlocks(
            data.request_id, start, end, blocks, divisible, prompt.overlaps, prompt.alone
        )

    def _blocks_to_load(
        self, data: RequestData, hit: Hit, start: int, end: int
    ) -> Iterator[BlockLoad]:
        size = self._tokens_per_block
        keys = hit.all_keys
        for group, (window, ids) in enumerate(zip(self._windows, by_group(data), strict=True)):
            if self._only_counts[group]:
                continue  # the store must have these blocks, but no layer reads them
            needed = blocks_needed(window, end, size)
            for number in range(max(start // size, needed.start), needed.stop):
                if number >= len(ids) or ids[number] < 0:
                    raise ConnectorContractError(
                        f"request {data.request_id}: no block in pool group {group} for the tokens "
                        f"from {number * size} on, which a load up to {end} fills; the cache "
                        "manager has to reserve it"
                    )
                shares = hit.shares.get((group, number))
                yield BlockLoad(keys[number], ids[number], group, shares, number)

    def failed(self, request: LlmRequest) -> None:
        """Treats the store's answer as empty, because a load of `request` failed."""
        if prompt := self._prompts.get(request.request_id):
            prompt.promised = None
            prompt.hit = Hit()

    def drop(self, request: LlmRequest) -> None:
        """Cancels the lookup of `request`, which has ended. Idempotent."""
        if prompt := self._prompts.pop(request.request_id, None):
            prompt.lookup.cancel()

    def close(self) -> None:
        """Cancels all lookups, and releases the store; the last user closes it."""
        self.budget.end()
        for prompt in self._prompts.values():
            prompt.lookup.cancel()
        self._prompts.clear()
        self.store.release()


def by_group(data: RequestData) -> Sequence[list[int]]:
    """Returns the new block ids of `data` by pool group."""
    return data.new_block_ids_by_group or (data.new_block_ids,)
