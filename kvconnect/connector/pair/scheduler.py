"""The built-in scheduler: finds prompts in a store or at a peer, and orders saves of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from kvconnect.connector.data import LlmArgs, RequestData, SchedulerOutput
from kvconnect.connector.disagg.messages import EndOrder
from kvconnect.connector.io.lookup import Hit
from kvconnect.connector.io.orders import LoadBlocks, SaveOrder
from kvconnect.connector.pair.finding import StoreFinding, by_group
from kvconnect.connector.pair.hooks import GuardedHooks, StoreHooks
from kvconnect.connector.pair.messages import OffloadMeta, WorkerMeta
from kvconnect.connector.pair.save_plan import SavePlan
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.explain.account import PromptAccount
from kvconnect.explain.outcome import NotSaved
from kvconnect.request import LlmRequest
from kvconnect.trace import count

if TYPE_CHECKING:
    from kvconnect.connector.disagg.decode import DecodeBook
    from kvconnect.connector.disagg.prefill import PrefillBook

# Blocks of requests that ended are written later, and may be lost then.
_MOST_ACCOUNTS = 64


class OffloadScheduler(StoreHooks, KvCacheConnectorScheduler):
    """Drives any `Backend`, together with `OffloadWorker`, through the public connector API.

    Lookups start when a request arrives. At admission, all requests of one step together wait at
    most ``lookup_timeout_ms`` for answers: a late answer is a miss, and may serve a later
    admission. After a late answer no request waits until the store answers in time again. Loads run
    in the background. In an engine that can compute meanwhile, a load from the store fills the last
    block of a prompt first.

    A block is ordered into the store in the step that fills it; with ``save_on="finish"`` the
    workers stage it at its request's end, or when that is preempted. A block that is dropped or
    below ``min_priority`` ends its sequence's saves: without it, the later blocks cannot be found.
    Dropped ones are ordered again at the request's end, and by any other request that uses them. No
    record of stored blocks outlives a request: each request looks the store up.

    With ``transfer`` the pair also publishes prompts to other engines and fetches theirs, as each
    request's parameters say. A prompt that a peer publishes is fetched rather than loaded from the
    store. A prompt whose fetch is refused, late or broken is computed; no method raises for that.
    The blocks of a request that ended are kept until neither a reader nor the store needs them.
    ``transfer`` without a store is the same, without lookups and saves.

    A subclass may override the hooks of `StoreHooks`, and is named in the configuration beside the
    store. The other methods are the contract with the runtime: an override calls ``super()``.

    Attributes:
        whole_blocks: true if the engine cannot use part of a block, so that hits end with a block.
        hashes_at_once: true if `on_new_request` computes the keys, for an engine that needs them;
            otherwise the store's thread does.
        keeps_snapshots: true if a request holds its last snapshot of recurrent states until it has
            another or ends. Otherwise each is ordered in the step that reports its block, or never.
    """

    whole_blocks: ClassVar[bool] = False
    hashes_at_once: ClassVar[bool] = True
    keeps_snapshots: ClassVar[bool] = True

    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self._config = llm_args.kv_connector_config
        self._tokens_per_block = llm_args.tokens_per_block
        self._windows = tuple(layout.window for layout in llm_args.layouts)
        self._hooks = GuardedHooks(self, self._config.min_priority)
        self._states = frozenset(
            group for group, layout in enumerate(llm_args.layouts) if layout.kind == "state"
        )
        self._plans: dict[int, SavePlan] = {}
        self._ended: list[SaveOrder] = []  # and the next are for the next step's metadata
        self._forgotten: list[int] = []
        self._backlogged = False
        self._accounts: dict[int, PromptAccount] = {}  # the last ended requests
        self._shared: list[EndOrder] = []
        self._published: PrefillBook | None = None
        self._fetched: DecodeBook | None = None
        self._finding: StoreFinding | None = None
        with ExitStack() as opened:
            if self._config.transfer is not None:
                self._open_transfer(opened)
            if self._config.transfer is None or llm_args.has_store:
                self._finding = StoreFinding(
                    llm_args, whole_blocks=self.whole_blocks, hashes_at_once=self.hashes_at_once
                )
                opened.callback(self._finding.close)
            self._opened = opened.pop_all()
        self._overlapping: dict[
            int, int
        ] = {}  # end of the load, by request that may compute beside it
        self._sources = [one for one in (self._fetched, self._finding) if one is not None]

    def _open_transfer(self, opened: ExitStack) -> None:
        from kvconnect.connector.disagg.decode import DecodeBook
        from kvconnect.connector.disagg.node import TransferNode
        from kvconnect.connector.disagg.prefill import PrefillBook

        node = TransferNode.acquire(self._llm_args)
        opened.callback(node.release)
        self._published = PrefillBook(node, self._llm_args)
        self._fetched = DecodeBook(node, self._llm_args)
        opened.callback(self._fetched.close)

    # ------------------------------------------------------------------ a request's way

    def on_new_request(self, request: LlmRequest) -> None:
        """Starts the lookup of `request`, and claims its prompt if a peer publishes it.

        Raises:
            ConfigurationError: the request's ``kv_transfer_params`` are wrong, or request a
                transfer that this engine's role excludes.
        """
        self._begin(request)
        if self._published is not None and self._fetched is not None:
            self._published.begin(request)
            self._fetched.begin(request)

    def _begin(self, request: LlmRequest) -> None:
        plan = SavePlan(
            request,
            min_priority=self._config.min_priority,
            windows=self._windows,
            hooks=self._hooks,
            states=self._states if self.keeps_snapshots else (),
            state_interval=self._llm_args.kv_cache_config.state_interval,
        )
        self._plans[request.request_id] = plan
        if self._finding is not None:
            if request.cache.ttl is not None and self._finding.store.check_ttl():
                request.account.ttl_s = request.cache.ttl
            may_load = request.cache.load and self._hooks.may_load(request)
            self._finding.begin(request, may_load=may_load)

    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Returns the number of tokens beyond `num_computed_tokens` at a peer, else in the store.

        Waits for the store within the step's budget.
        """
        for source in self._sources:
            if num_tokens := source.offer(request, num_computed_tokens):
                return num_tokens, True
        return 0, False

    def load_overlaps(self, request: LlmRequest) -> bool:
        """Returns True, but for fetches of several pools, of windows, or compared with digests."""
        if self._fetched is not None and self._fetched.fetches(request):
            return self._fetched.overlaps(request)
        return self._finding is not None and self._finding.overlaps(request)

    def load_follows(self, request: LlmRequest) -> bool:
        """Returns True for loads from a peer."""
        return self._fetched is not None and self._fetched.fetches(request)

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Drops the list of blocks: all are new, and the step's report will contain them."""
        self._plans[request.request_id].forget_blocks()
        if self._published is not None:
            self._published.admitted(request)
        for source in self._sources:
            source.admitted(request)

    def blocks_replaced(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Drops the list of blocks; the next report contains all blocks."""
        self._plans[request.request_id].forget_blocks()

    def load_failed(self, request: LlmRequest, num_valid_tokens: int) -> None:
        """Marks the blocks that were not loaded as missing: they are computed, and saved anew."""
        self._overlapping.pop(request.request_id, None)
        for source in self._sources:
            source.failed(request)
        self._plans[request.request_id].note_missing(num_valid_tokens // self._tokens_per_block)

    def on_rewind(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Removes the blocks of rejected tokens, and drops held saves of such blocks."""
        plan = self._plans[request.request_id]
        if plan.hold(block_ids) and plan.num_held:
            # Blocks that the workers hold may be filled with other tokens than those of their
            # orders.
            self._forgotten.append(request.request_id)
            plan.num_held = 0
            plan.note_missing(0)

    def request_reset(self, request: LlmRequest) -> None:
        """Starts another lookup, and plans the request's saves anew.

        A published prompt will be published anew; a claimed prompt is computed.
        """
        if self._published is not None:
            self._published.reset(request)
        self._drop(request)
        self._begin(request)

    def request_aborted(self, request: LlmRequest) -> None:
        """Drops the request's state, unless it holds blocks: then `request_finished` follows."""
        if self._published is not None:
            self._published.aborted(request)
        if plan := self._plans.get(request.request_id):
            self._learn(plan)
            if plan.num_blocks == 0:
                del self._plans[request.request_id]
        self._drop(request)

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        """Returns True if blocks are still to be saved, or may be needed by a reader.

        The tail and blocks that were dropped before are saved, too.
        """
        plan = self._plans.pop(request.request_id, None)
        try:
            saves = plan is not None and self._saves_rest(plan, cache_block_ids)
        except BaseException:
            if self._published is not None:
                self._published.aborted(request)  # the blocks of this request are not kept
            raise
        finally:
            self._drop(request)
        shared = None if self._published is None else self._published.finished(request)
        if shared is not None:
            self._shared.append(shared)
        return saves or shared is not None

    def _drop(self, request: LlmRequest) -> None:
        self._overlapping.pop(request.request_id, None)
        for source in self._sources:
            source.drop(request)

    def _saves_rest(self, plan: SavePlan, block_ids: list[int]) -> bool:
        """Returns whether blocks of an ended request are to be saved, and orders that."""
        if self._finding is None:
            return False
        plan.hold(block_ids)
        end = self._end(plan, self._finding)
        num_blocks = plan.num_held + len(end.blocks)
        if not num_blocks:
            return False
        first = 0 if plan.num_held else end.blocks[0].number
        account = plan.request.account
        if not self._finding.store.backend.available:
            count("connector.save.lost", blocks=num_blocks)
            account.not_saved(first * self._tokens_per_block, NotSaved.UNAVAILABLE)
        elif self._backlogged and self._config.on_backlog == "drop":
            count("connector.save.dropped", blocks=num_blocks)
            account.not_saved(first * self._tokens_per_block, NotSaved.BACKLOG)
        else:
            self._ended.append(end)
            account.saved_after_all()
            return True
        if plan.num_held:
            self._forgotten.append(end.request_id)
        return False

    def _end(self, plan: SavePlan, finding: StoreFinding) -> SaveOrder:
        """Returns the order for the valid blocks of an ended request that the store lacks."""
        self._learn(plan, late=Hit())
        self._accounts[plan.request.request_id] = plan.request.account
        if len(self._accounts) > _MOST_ACCOUNTS:
            del self._accounts[next(iter(self._accounts))]
        request, size = plan.request, self._tokens_per_block
        valid = min(request.num_computed_tokens, request.num_tokens, plan.num_blocks * size)
        with_tail = finding.store.saves_tails and valid % size
        rest = plan.order(valid // size, valid, valid if with_tail else None, ends=True)
        # Blocks kept for a store that does not answer would be missing for later requests.
        waits = self._config.on_backlog == "wait" or not finding.budget.suspended
        return replace(rest or SaveOrder(request.request_id, ()), end=valid, waits=waits)

    def get_kv_transfer_params(self, request: LlmRequest) -> dict[str, Any] | None:
        """Returns what another engine needs to fetch the prompt, if it is published."""
        return None if self._published is None else self._published.take_params(request)

    # ------------------------------------------------------------------ one step

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> OffloadMeta | None:
        """Returns the orders of this step; ``None`` if there are none."""
        loads: list[LoadBlocks] = []
        saves: list[SaveOrder] = []
        if self._finding is not None:
            self._finding.budget.start_step()
            loads += filter(None, map(self._finding.order, scheduler_output.loading_requests))
        for load in loads:
            plan = self._plans[load.request_id]
            self._hooks.hit(plan.request, load.end - load.start)
            if load.overlaps:
                self._overlapping[load.request_id] = plan.load_end = load.end
        floors: dict[int, int] = {}
        for data in scheduler_output.new_requests:
            self._plans[data.request_id].forget_blocks()
            self._order_save(data, saves)
            self._raise_floor(data, floors)
        for data in scheduler_output.cached_requests:
            self._order_save(data, saves)
            self._raise_floor(data, floors)
        meta = self._meta(loads, saves)
        if floors:
            meta = replace(meta or OffloadMeta(), floors=floors)
        if self._published is None or self._fetched is None:
            return meta
        publish = tuple(self._published.orders(scheduler_output))
        fetches = tuple(self._fetched.orders(scheduler_output))
        self._overlapping |= {one.request_id: one.end for one in fetches if one.overlaps}
        if publish or fetches:
            meta = replace(meta or OffloadMeta(), publish=publish, fetches=fetches)
        return meta

    def build_idle_meta(self) -> OffloadMeta | None:
        """Returns the requests that ended; ``None`` if there are none."""
        return self._meta((), ())

    def _meta(self, loads: Sequence[LoadBlocks], saves: Sequence[SaveOrder]) -> OffloadMeta | None:
        lost = () if self._published is None else self._published.take_lost()
        if not (loads or saves or self._ended or self._forgotten or self._shared or lost):
            return None
        ended, forgotten, shared = self._ended, self._forgotten, self._shared
        self._ended, self._forgotten, self._shared = [], [], []
        return OffloadMeta(
            tuple(loads),
            tuple(saves),
            tuple(ended),
            tuple(forgotten),
            shared=tuple(shared),
            lost=lost,
        )

    def update_from_workers(self, metas: Sequence[object]) -> None:
        """Postpones a request's saves to its end if the store lacks one of its blocks."""
        self._backlogged = False
        for meta in metas:
            if not isinstance(meta, WorkerMeta):
                continue
            self._backlogged |= meta.backlogged
            for request_id, block in meta.missing.items():
                why = NotSaved.BACKLOG if request_id in meta.dropped else NotSaved.FAILED
                if (plan := self._plans.get(request_id)) is not None:
                    plan.note_missing(block, until_end=True)
                    plan.request.account.not_saved(block * self._tokens_per_block, why)
                elif (account := self._accounts.get(request_id)) is not None:
                    account.not_saved(block * self._tokens_per_block, why)

    def _order_save(self, data: RequestData, saves: list[SaveOrder]) -> None:
        """Orders the blocks that this step fills."""
        plan = self._plans[data.request_id]
        if any(by_group(data)):
            plan.extend(by_group(data), data.priorities)
        # Proposed tokens may be rejected: only those that the request has are certain.
        valid = data.computed_position
        end = min(valid + data.num_scheduled_tokens, plan.request.num_tokens)
        num_full = end // self._tokens_per_block
        if self._finding is None or not plan.is_due(num_full):
            return
        if not self._finding.store.backend.available:
            return  # due blocks stay due
        self._learn(plan)
        order = plan.order(num_full, valid)
        if order is not None:
            saves.append(order)
            if self._config.save_on == "finish":
                plan.num_held += self._num_held(order)

    def _num_held(self, order: SaveOrder) -> int:
        """Returns how many blocks of `order` the workers hold: all but snapshots of states."""
        if not self._states:
            return len(order.blocks)
        return sum(block.group not in self._states for block in order.blocks)

    def _raise_floor(self, data: RequestData, floors: dict[int, int]) -> None:
        """Adds the end of the step's tokens to `floors`, so that no load writes before it."""
        end = self._overlapping.get(data.request_id)
        if end is None:
            return
        computed = data.computed_position + data.num_scheduled_tokens
        floors[data.request_id] = computed
        if computed > end:
            del self._overlapping[data.request_id]  # its load has ended, or may write no more

    def _learn(self, plan: SavePlan, late: Hit | None = None) -> None:
        """Records the stored blocks; `late` replaces an answer that has not arrived."""
        if self._finding is not None and not plan.knows_store:
            hit = self._finding.hit(plan.request) or late
            if hit is not None:
                plan.note_stored(hit.num_stored, hit.tail)

    # ------------------------------------------------------------------ the end

    def shutdown(self) -> None:
        """Releases the store, whose last user closes it, and drops all claims. Idempotent."""
        self._plans.clear()
        self._opened.close()
