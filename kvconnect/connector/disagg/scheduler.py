"""The transfer pair's scheduler: which prompts are handed out, which are fetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvconnect.connector.data import LlmArgs, SchedulerOutput
from kvconnect.connector.disagg.decode import DecodeBook
from kvconnect.connector.disagg.messages import DisaggMeta, EndOrder, WorkerMeta
from kvconnect.connector.disagg.no_store import NoStoreScheduler
from kvconnect.connector.disagg.node import TransferNode
from kvconnect.connector.disagg.params import FetchParams, PrefillParams, transfer_params
from kvconnect.connector.disagg.prefill import PrefillBook
from kvconnect.connector.pair.scheduler import OffloadScheduler
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.errors import ConfigurationError
from kvconnect.request import LlmRequest

__all__ = ["DisaggScheduler"]


class DisaggScheduler(KvCacheConnectorScheduler):
    """Hands out prompts to other engines and fetches theirs, as each request's parameters say.

    Everything else is the store's pair's, if the configuration names a store: requests without
    ``kv_transfer_params``, all saves, and prompts that cannot be fetched. Both answer every call of
    the contract; a request's blocks are kept until both have let go of them.

    What a load is refused for, late or broken is computed; nothing here raises for that.
    """

    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self._node: TransferNode | None = TransferNode.acquire(llm_args)
        try:
            self._store = _store_of(llm_args)
        except BaseException:
            self._node.release()
            raise
        self._prefill = PrefillBook(self._node, llm_args)
        self._decode = DecodeBook(self._node, llm_args)
        self._role = self._node.config.role
        self._ends: list[EndOrder] = []

    # ------------------------------------------------------------------ a request's way

    def on_new_request(self, request: LlmRequest) -> None:
        """Claim what is to be fetched at once; the store is asked, too.

        Raises:
            ConfigurationError: the request's ``kv_transfer_params`` are wrong, or ask for what this
                engine's role does not do.
        """
        self._store.on_new_request(request)
        params = transfer_params(request.kv_transfer_params)
        if isinstance(params, PrefillParams):
            self._check_role("prefill")
            self._prefill.add(request, params)
        elif isinstance(params, FetchParams):
            self._check_role("decode")
            self._decode.add(request, params)

    def _check_role(self, needed: str) -> None:
        if self._role not in {needed, "both"}:
            raise ConfigurationError(
                f"kv_transfer_params: they ask for '{needed}', this engine has "
                f"TransferConfig.role='{self._role}'; send them to another, or give role='both'"
            )

    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """What the other side has, or is still asked for; else what the store has."""
        promised = self._decode.promise(request, num_computed_tokens)
        if promised:
            return promised, True
        return self._store.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Let go of what is not taken."""
        self._decode.admitted(request)
        self._prefill.admitted(request)
        self._store.update_state_after_alloc(request, block_ids)

    def blocks_replaced(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Its blocks are told anew."""
        self._store.blocks_replaced(request, block_ids)

    def request_reset(self, request: LlmRequest) -> None:
        """It is computed when it comes again, and handed out anew if no reader had begun."""
        self._prefill.reset(request)
        self._decode.drop(request.request_id)
        self._store.request_reset(request)

    def request_aborted(self, request: LlmRequest) -> None:
        """Let go of what was claimed for it, and of those that claimed it."""
        self._prefill.aborted(request)
        self._decode.drop(request.request_id)
        self._store.request_aborted(request)

    def load_failed(self, request: LlmRequest, num_valid_tokens: int) -> None:
        """Compute."""
        self._decode.drop(request.request_id)
        self._store.load_failed(request, num_valid_tokens)

    def on_rewind(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Prompts are not rewound: for the store."""
        self._store.on_rewind(request, block_ids)

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        """True while a reader, or the store, may need the blocks."""
        self._decode.drop(request.request_id)
        try:
            stored = self._store.request_finished(request, cache_block_ids)
        except BaseException:
            self._prefill.aborted(request)  # its blocks are not kept
            raise
        end = self._prefill.finished(request, stored=stored)
        if end is None and not stored:
            return False
        self._ends.append(end or EndOrder(request.request_id, stored=stored, shared=False))
        return True

    def get_kv_transfer_params(self, request: LlmRequest) -> dict[str, Any] | None:
        """What the other side needs to fetch the prompt, if it is handed out."""
        return self._prefill.take_params(request) or self._store.get_kv_transfer_params(request)

    # ------------------------------------------------------------------ one step

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> DisaggMeta:
        """The step's orders, and the store's metadata."""
        meta = DisaggMeta(
            self._store.build_connector_meta(scheduler_output),
            tuple(self._prefill.orders(scheduler_output)),
            tuple(self._ends),
            tuple(self._decode.orders(scheduler_output)),
            self._prefill.take_lost(),
        )
        self._ends.clear()
        return meta

    def build_idle_meta(self) -> DisaggMeta | None:
        """Which requests ended, and the store's, if there is anything."""
        store, ends = self._store.build_idle_meta(), tuple(self._ends)
        lost = self._prefill.take_lost()
        self._ends.clear()
        empty = store is None and not (ends or lost)
        return None if empty else DisaggMeta(store, ends=ends, lost=lost)

    def update_from_workers(self, metas: Sequence[object]) -> None:
        """For the store."""
        stores = [one.store for one in metas if isinstance(one, WorkerMeta)]
        self._store.update_from_workers([one for one in stores if one is not None])

    def take_events(self) -> Sequence[object]:
        """The store's."""
        return self._store.take_events()

    def shutdown(self) -> None:
        """Let go of what is claimed, and of the store. Idempotent."""
        node, self._node = self._node, None
        if node is None:
            return
        self._decode.drop_all()
        try:
            self._store.shutdown()
        finally:
            node.release()


def _store_of(llm_args: LlmArgs) -> KvCacheConnectorScheduler:
    if not llm_args.has_store:
        return NoStoreScheduler(llm_args)
    return OffloadScheduler(llm_args)
