"""The built-in scheduler: finds prompts in a store and orders saves of new blocks into it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from kvconnect.connector.data import LlmArgs, RequestData, SchedulerOutput
from kvconnect.connector.io.budget import LookupBudget
from kvconnect.connector.io.lookup import Hit, Query, blocks_needed, look_up
from kvconnect.connector.io.open_store import OffloadStore
from kvconnect.connector.io.orders import BlockLoad, LoadBlocks, SaveOrder
from kvconnect.connector.io.reply import Reply
from kvconnect.connector.pair.messages import OffloadMeta, RequestEnd, WorkerMeta
from kvconnect.connector.pair.save_plan import SavePlan
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.errors import ConnectorContractError, UsageError
from kvconnect.keys import KeyChain
from kvconnect.request import LlmRequest
from kvconnect.trace import count, warn_once

__all__ = ["OffloadScheduler"]

_LEFT_ALONE = Reply.settled(Hit())


@dataclass(slots=True, eq=False)
class _State:
    """The scheduler's record of a live request.

    Attributes:
        request: the runtime's.
        asked: its keys, as they are looked up in the store.
        saves: the blocks that the store still lacks.
        lookup: the lookup in the store, running or answered.
        hit: the answer, once it was read.
        promised: tokens ``start..end`` that the store has for this admission, until their load is
            ordered.
        num_held: blocks that the workers hold until the request's end.
        asked_at: when an answer to `lookup` was first asked for, by an engine that asks again.
    """

    request: LlmRequest
    asked: KeyChain
    saves: SavePlan
    lookup: Reply[Hit]
    hit: Hit | None = None
    promised: tuple[int, int] | None = None
    num_held: int = 0
    asked_at: float | None = None


class OffloadScheduler(KvCacheConnectorScheduler):
    """Drives any `Backend`, together with `OffloadWorker`, through the public connector API.

    Lookups start when a request arrives. At admission, all requests of one step together wait at
    most ``lookup_timeout_ms`` for answers: a late answer is a miss, and may serve a later
    admission. After that no request waits until the store answers in time again.
    Loads run in the background.

    A block is ordered into the store in the step that fills it; with ``save_on="finish"`` the
    workers stage it at its request's end, or when that is preempted. A block that is dropped or
    below ``min_priority`` ends its sequence's saves: without it, the later blocks cannot be found.
    Dropped ones are ordered again at the request's end, and by any other request that uses them.
    No record of stored blocks outlives a request: each request looks the store up.

    Attributes:
        whole_blocks: the engine cannot use part of a block: hits end where blocks do.
        hashes_at_once: keys are known when `on_new_request` returns, for an engine that needs them
            itself; otherwise the store's thread hashes them.
    """

    whole_blocks: ClassVar[bool] = False
    hashes_at_once: ClassVar[bool] = True

    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self._config = llm_args.kv_connector_config
        self._tokens_per_block = llm_args.kv_cache_config.tokens_per_block
        self._min_tokens = max(1, self._config.min_load_tokens)
        self._windows = tuple(layout.window for layout in llm_args.layouts)
        self._has_windows = any(window is not None for window in self._windows)
        # Without windows, in one pool: a load serves as far as it comes.
        self._divisible = self._windows == (None,)
        self._states: dict[int, _State] = {}
        self._ended: list[RequestEnd] = []  # and the next are for the next step's metadata
        self._forgotten: list[int] = []
        self._backlogged = False
        self._open_store: OffloadStore | None = OffloadStore.acquire(llm_args)
        self._budget = LookupBudget(
            self._config.lookup_timeout_ms / 1000, self._store.backend, self._store.io.submit
        )

    # ------------------------------------------------------------------ finding

    def on_new_request(self, request: LlmRequest) -> None:
        """Starts the lookup of `request`, unless the store's breaker is open."""
        store = self._store
        if self.hashes_at_once:
            request.block_keys()
        asked = request.key_chain.snapshot()
        plan = SavePlan(request, min_priority=self._config.min_priority, windows=self._windows)
        lookup = _LEFT_ALONE
        if store.backend.available:
            lookup = store.io.submit(self._budget.timed(lambda: self._look_up(store, asked)))
        self._states[request.request_id] = _State(request, asked, plan, lookup)

    async def _look_up(self, store: OffloadStore, chain: KeyChain) -> Hit:
        """Looks `chain` up, on the store's loop; no other thread uses `chain` until then."""
        query = Query.of(
            chain,
            heads=store.heads,
            shared=store.backend.capabilities.shared,
            whole_blocks=self.whole_blocks,
        )
        return await look_up(store.backend, query)

    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Returns the tokens that the store has beyond `num_computed_tokens`.

        Waits within the step's budget.
        """
        state = self._states[request.request_id]
        if state.hit is None and self._could_load(state, num_computed_tokens):
            self._budget.wait(state.lookup)
        return self._answer(state, num_computed_tokens)

    def _could_load(self, state: _State, num_computed_tokens: int) -> bool:
        # The last token is always computed.
        return state.request.num_tokens - 1 - num_computed_tokens >= self._min_tokens

    def _answer(self, state: _State, num_computed_tokens: int) -> tuple[int, bool]:
        state.promised = None
        if not self._could_load(state, num_computed_tokens):
            return 0, False
        hit = self._hit(state)
        if hit is None:
            count("connector.lookup.late")
            state.request.lookup_late = True
            return 0, False
        end = self._usable(state.request, hit, num_computed_tokens)
        num_tokens = end - num_computed_tokens
        if num_tokens < self._min_tokens:
            return 0, False
        state.promised = (num_computed_tokens, end)
        return num_tokens, True

    def _usable(self, request: LlmRequest, hit: Hit, num_computed_tokens: int) -> int:
        """Returns the end of the part of `hit` to load: all, up to its last block, or none (0)."""
        num_tokens, end = request.num_tokens, hit.end
        if end < num_tokens:
            return end
        if end > num_tokens or not self.whole_blocks or self._has_windows:
            return 0  # the request was rewound since: windows were looked up for this end only
        # A load may bring the last token, too, which the engine computes again. If the device has
        # all blocks but the last one, that block is computed.
        size = self._tokens_per_block
        return end - size if end - size <= num_computed_tokens else end

    def _hit(self, state: _State) -> Hit | None:
        """Returns the store's answer; empty if it failed, ``None`` if it is late. Never waits."""
        if state.hit is None and state.lookup.done():
            state.request.key_chain.adopt(state.asked)
            error = state.lookup.exception()
            if error is None:
                state.hit = state.lookup.result()
            else:
                state.hit = Hit()
                count("connector.lookup.failed")
                warn_once("connector.lookup", f"lookup failed, the prompt is computed: {error}")
        return state.hit

    # ------------------------------------------------------------------ a request's way

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Drops the reported blocks: all are new, and the step's report will list them."""
        state = self._states[request.request_id]
        state.saves.forget_blocks()
        if not request.num_connector_matched_tokens:
            state.promised = None

    def blocks_replaced(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Drops the reported blocks; the next report lists all of them, the new ones too."""
        self._states[request.request_id].saves.forget_blocks()

    def load_failed(self, request: LlmRequest, num_valid_tokens: int) -> None:
        """Marks the blocks that were not loaded as missing: they are computed, and saved anew."""
        state = self._states[request.request_id]
        state.promised = None
        state.hit = Hit()
        state.saves.note_missing(num_valid_tokens // self._tokens_per_block)

    def on_rewind(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Removes the blocks of rejected tokens, and drops held saves that may be wrong now."""
        state = self._states[request.request_id]
        if state.saves.hold(block_ids) and state.num_held:
            # Blocks that the workers hold may be filled with other tokens than their orders say.
            self._forgotten.append(request.request_id)
            state.num_held = 0
            state.saves.note_missing(0)

    def request_reset(self, request: LlmRequest) -> None:
        """Starts another lookup, and plans the request's saves from the start."""
        self._states.pop(request.request_id).lookup.cancel()
        self.on_new_request(request)

    def request_aborted(self, request: LlmRequest) -> None:
        """Drops the request's state, unless it holds blocks: then `request_finished` follows."""
        state = self._states.get(request.request_id)
        if state is not None and state.saves.num_blocks == 0:
            state.lookup.cancel()
            del self._states[request.request_id]

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        """Returns True if blocks, dropped ones among them, or the tail are still to be saved."""
        state = self._states.pop(request.request_id, None)
        if state is None:
            return False
        state.saves.hold(cache_block_ids)
        end = self._end(state)
        state.lookup.cancel()
        num_blocks = state.num_held + (0 if end.rest is None else len(end.rest.blocks))
        if not num_blocks:
            return False
        if not self._store.backend.available:
            count("connector.save.lost", blocks=num_blocks)
        elif self._backlogged and self._config.on_backlog == "drop":
            count("connector.save.dropped", blocks=num_blocks)
        else:
            self._ended.append(end)
            return True
        if state.num_held:
            self._forgotten.append(request.request_id)
        return False

    def _end(self, state: _State) -> RequestEnd:
        """Returns the order for the valid blocks of an ended request that the store lacks."""
        saves, request = state.saves, state.request
        self._learn(state, late=Hit())
        size = self._tokens_per_block
        valid = min(request.num_computed_tokens, request.num_tokens, saves.num_blocks * size)
        with_tail = self._store.enumerable and self._config.save_partial_tails and valid % size
        rest = saves.order(valid // size, valid, valid if with_tail else None)
        # A store that does not answer would only keep the blocks from the requests to come.
        waits = self._config.on_backlog == "wait" or not self._budget.suspended
        return RequestEnd(request.request_id, valid, rest, waits)

    # ------------------------------------------------------------------ one step

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadMeta | None:
        """Returns the loads and saves of this step; ``None`` if there are none."""
        self._budget.start_step()
        saves: list[SaveOrder] = []
        loads = [
            load
            for data in scheduler_output.loading_requests
            if (load := self._load_of(data)) is not None
        ]
        for data in scheduler_output.new_requests:
            plan = self._states[data.request_id].saves
            plan.forget_blocks()
            plan.extend(_by_group(data), data.priorities)
            self._order_save(data, saves, data.computed_position)
        for data in scheduler_output.cached_requests:
            if any(_by_group(data)):
                plan = self._states[data.request_id].saves
                plan.extend(_by_group(data), data.priorities)
            self._order_save(data, saves, data.computed_position)
        return self._meta(loads, saves)

    def build_idle_meta(self) -> OffloadMeta | None:
        """Returns the requests that ended; ``None`` if there are none."""
        return self._meta((), ())

    def _meta(self, loads: Sequence[LoadBlocks], saves: Sequence[SaveOrder]) -> OffloadMeta | None:
        if not (loads or saves or self._ended or self._forgotten):
            return None
        ended, forgotten = tuple(self._ended), tuple(self._forgotten)
        self._ended.clear()
        self._forgotten.clear()
        return OffloadMeta(tuple(loads), tuple(saves), ended, forgotten)

    def update_from_workers(self, metas: Sequence[object]) -> None:
        """Postpones saves to a request's end if one of its blocks was not stored on some rank."""
        self._backlogged = False
        for meta in metas:
            if not isinstance(meta, WorkerMeta):
                continue
            self._backlogged |= meta.backlogged
            for request_id, block in meta.missing.items():
                if (state := self._states.get(request_id)) is not None:
                    state.saves.note_missing(block, until_end=True)

    def _load_of(self, data: RequestData) -> LoadBlocks | None:
        """Returns the load that was promised for a request; ``None``: it is of no use any more."""
        state = self._states[data.request_id]
        promised, state.promised = state.promised, None
        # The runtime did not accept a match that ends within the device's tokens.
        if promised is None or state.hit is None or data.computed_position >= promised[1]:
            return None
        # The device may have kept less than it matched when the store was asked.
        held = data.computed_position - data.computed_position % self._tokens_per_block
        start, end = min(promised[0], held), promised[1]
        blocks = tuple(self._blocks_to_load(data, state.hit, start, end))
        return LoadBlocks(data.request_id, start, end, blocks, self._divisible)

    def _blocks_to_load(
        self, data: RequestData, hit: Hit, start: int, end: int
    ) -> Iterator[BlockLoad]:
        size = self._tokens_per_block
        keys = hit.all_keys
        for group, (window, ids) in enumerate(zip(self._windows, _by_group(data), strict=True)):
            needed = blocks_needed(window, end, size)
            for number in range(max(start // size, needed.start), needed.stop):
                if number >= len(ids) or ids[number] < 0:
                    raise ConnectorContractError(
                        f"request {data.request_id}: no block in pool group {group} for the tokens "
                        f"from {number * size} on, which a load up to {end} fills; the cache "
                        "manager has to reserve it"
                    )
                shares = hit.shares.get((group, number))
                yield BlockLoad(keys[number], ids[number], group, shares)

    def _order_save(self, data: RequestData, saves: list[SaveOrder], valid: int) -> None:
        """Orders the blocks that this step fills, after `valid` tokens that are valid before."""
        state = self._states[data.request_id]
        # Proposed tokens may be rejected: only those that the request has are certain.
        end = min(valid + data.num_scheduled_tokens, state.request.num_tokens)
        num_full = end // self._tokens_per_block
        if not state.saves.is_due(num_full):
            return
        if not self._store.backend.available:
            return  # due blocks stay due
        self._learn(state)
        order = state.saves.order(num_full, data.computed_position)
        if order is not None:
            saves.append(order)
            state.num_held += len(order.blocks) if self._config.save_on == "finish" else 0

    def _learn(self, state: _State, late: Hit | None = None) -> None:
        """Records which blocks the store has; `late` stands for an answer that has not come."""
        if not state.saves.knows_store and (hit := self._hit(state) or late) is not None:
            state.saves.note_stored(hit.num_stored, hit.tail)

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Releases the store; the last user closes it. Idempotent."""
        store, self._open_store = self._open_store, None
        if store is None:
            return
        self._budget.end()
        for state in self._states.values():
            state.lookup.cancel()
        self._states.clear()
        store.release()

    @property
    def _store(self) -> OffloadStore:
        if self._open_store is None:
            raise UsageError("OffloadScheduler: was shut down")
        return self._open_store


def _by_group(data: RequestData) -> Sequence[list[int]]:
    return data.new_block_ids_by_group or (data.new_block_ids,)
