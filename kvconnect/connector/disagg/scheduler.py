"""The transfer pair's scheduler: decides which prompts are published and which are fetched."""

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
    """Publishes prompts to other engines and fetches theirs, as each request's parameters say.

    The store's pair, if the configuration names a store, does the rest: requests without
    ``kv_transfer_params``, all saves, and prompts that cannot be fetched. Both answer every call of
    the contract. A request's blocks are kept until both have released them. A prompt whose load is
    refused, late or broken is computed; no method raises for that.
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
        """Claims a prompt that is to be fetched at once; starts the store's lookup, too.

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
        """Returns the tokens that another engine publishes, or else those that the store has."""
        promised = self._decode.promise(request, num_computed_tokens)
        if promised:
            return promised, True
        return self._store.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Drops claims that the runtime does not use."""
        self._decode.admitted(request)
        self._prefill.admitted(request)
        self._store.update_state_after_alloc(request, block_ids)

    def blocks_replaced(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Passes the new blocks to the store; the next step sends them to the workers."""
        self._store.blocks_replaced(request, block_ids)

    def request_reset(self, request: LlmRequest) -> None:
        """Drops the claims of `request`, which is published anew when it is computed again."""
        self._prefill.reset(request)
        self._decode.drop(request.request_id)
        self._store.request_reset(request)

    def request_aborted(self, request: LlmRequest) -> None:
        """Drops the claims of `request`, and fails the claims of its readers."""
        self._prefill.aborted(request)
        self._decode.drop(request.request_id)
        self._store.request_aborted(request)

    def load_failed(self, request: LlmRequest, num_valid_tokens: int) -> None:
        """Drops the claims of `request`, whose tokens are computed."""
        self._decode.drop(request.request_id)
        self._store.load_failed(request, num_valid_tokens)

    def on_rewind(self, request: LlmRequest, block_ids: list[int]) -> None:
        """Passes the rewind to the store; published prompts are never rewound."""
        self._store.on_rewind(request, block_ids)

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        """Returns True while a reader, or the store, may need the blocks."""
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
        """Returns what the other engine needs to fetch the prompt, if it is published."""
        return self._prefill.take_params(request) or self._store.get_kv_transfer_params(request)

    # ------------------------------------------------------------------ one step

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> DisaggMeta:
        """Returns the step's orders, and the store's metadata."""
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
        """Returns the ended requests and the store's metadata; ``None`` if there are neither."""
        store, ends = self._store.build_idle_meta(), tuple(self._ends)
        lost = self._prefill.take_lost()
        self._ends.clear()
        empty = store is None and not (ends or lost)
        return None if empty else DisaggMeta(store, ends=ends, lost=lost)

    def update_from_workers(self, metas: Sequence[object]) -> None:
        """Passes the metadata of the store's workers to the store."""
        stores = [one.store for one in metas if isinstance(one, WorkerMeta)]
        self._store.update_from_workers([one for one in stores if one is not None])

    def take_events(self) -> Sequence[object]:
        """Returns the store's events."""
        return self._store.take_events()

    def shutdown(self) -> None:
        """Drops all claims, and shuts the store down. Idempotent."""
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
