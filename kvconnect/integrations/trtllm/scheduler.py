"""The leader's half, which TensorRT-LLM calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvconnect.connector.io.orders import SaveOrder
from kvconnect.digest.doubts import Doubt, note_doubt
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.trtllm.attachment import Attachment
from kvconnect.integrations.trtllm.bases import connector_class
from kvconnect.integrations.trtllm.requests import StepOrders, TrackedRequest, tracked
from kvconnect.request import LlmRequest

if TYPE_CHECKING:
    from kvconnect.connector.scheduler import KvCacheConnectorScheduler as _Base
else:
    _Base = connector_class("KvCacheConnectorScheduler")


class KvConnectScheduler(_Base):
    """Finds prompts in a store, and orders saves of computed blocks.

    Promises only blocks that are in host memory and checked: see `Attachment`. So all loads are
    synchronous, and no request waits for one. Blocks are staged in the step that fills them: no
    request keeps its blocks beyond its end.

    Args:
        llm_args: TensorRT-LLM's.

    Raises:
        ConfigurationError: ``KVCONNECT_CONFIG`` is missing or wrong, or there are several ranks.
    """

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._attachment = Attachment.of(llm_args)
        self._requests: dict[int, TrackedRequest | None] = {}
        self._loads: dict[int, tuple[int, ...]] = {}  # for the next step

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Returns the tokens of whole blocks beyond `num_computed_tokens` that are fetched now.

        Never includes the last token. Blocks up to ``lookup_timeout_ms`` and ``load_timeout_s``.
        Returns 0 if computing them is predicted to be faster.
        """
        maker = self._attachment.maker
        self._forget_loads(request)
        if maker is None:
            return 0, False
        known = tracked(request, maker)
        # Once more: it was preempted, and its blocks are others.
        self._requests[request.request_id] = known
        if known is None:
            return 0, False
        size = known.request.key_chain.tokens_per_block
        keys = known.request.block_keys()
        num_stored = self._attachment.count_stored(keys)
        known.plan.note_stored((num_stored,))
        first = num_computed_tokens // size
        stop = min(num_stored, (known.request.num_tokens - 1) // size)
        wanted = (stop - first) * size
        least = max(1, self._attachment.settings.connector.min_load_tokens)
        if num_computed_tokens % size or wanted < least:
            return 0, False
        end = known.request.num_tokens
        load = self._attachment.choice.choose(num_computed_tokens, stop * size, end)
        if load is None:
            return 0, False
        fetched = self._attachment.fetch(request.request_id, keys[first:stop], load)
        if fetched < stop - first:
            known.plan.note_missing(first + fetched)
        if fetched * size < least:
            self._attachment.forget(request.request_id)
            return 0, False
        known.first, known.promised = first, fetched
        return fetched * size, False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Records the blocks that promised tokens are loaded into in the next step.

        Loads everything that has blocks. The engine computes what it does not take, with the same
        result.

        Raises:
            ConfigurationError: there are too few blocks for the tokens that were taken; continuing
                would make wrong tokens.
        """
        known = self._requests.get(request.request_id)
        if known is None or not known.promised:
            return
        taken = _num_taken(request)
        if taken == 0:
            known.promised = 0  # the blocks may be shared with other requests
        ids = list(block_ids[known.first : known.first + known.promised])
        # A window reaches back from the next token, so the last block before it is never passed.
        while ids and ids[-1] < 0:
            ids.pop()
        if taken is not None and len(ids) * known.request.key_chain.tokens_per_block < taken:
            raise ConfigurationError(
                f"request {request.request_id}: TensorRT-LLM took {taken} of the promised tokens, "
                f"and gave {len(ids)} blocks for them"
            )
        known.promised = len(ids)
        if ids:
            self._loads[request.request_id] = tuple(ids)
        else:
            self._attachment.forget(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> StepOrders | None:
        """Returns the loads and saves of this step; ``None`` if there are none.

        A request that is reported as new again has other blocks than before: it was reset.

        Raises:
            ConfigurationError: the step has loads of prefixes that were reserved, which was not
                promised.
        """
        if getattr(scheduler_output, "prefix_loads", None):
            raise ConfigurationError(
                "prefix_loads: kvconnect reserves no prefixes (reserve_prefix); it promises what "
                "it has fetched in get_num_new_matched_tokens"
            )
        for request_id, block in self._attachment.dropped.items():
            if (known := self._requests.get(request_id)) is not None:
                known.plan.note_missing(block, until_end=True)
        self._attachment.dropped.clear()
        loads, self._loads = self._loads, {}
        orders = [self._order_of_new(data) for data in scheduler_output.new_requests]
        orders += [self._order_of_cached(data) for data in scheduler_output.cached_requests]
        saves = tuple(order for order in orders if order is not None)
        self._begin_step(scheduler_output)
        return StepOrders(loads, saves) if loads or saves else None

    def _begin_step(self, output: Any) -> None:
        tokens, context = 0, 0.0
        for data in (*output.new_requests, *output.cached_requests):
            start, scheduled = data.computed_position, data.num_scheduled_tokens
            tokens += scheduled
            context += scheduled * (start + scheduled / 2)
        self._attachment.begin_step(tokens, context)

    def _order_of_new(self, data: Any) -> SaveOrder | None:
        known = self._reported_anew(data)
        if known is None:
            return None
        known.extend(data, self._attachment.first_id)
        computed = data.computed_position
        if known.promised:  # which is not counted in the first report
            size = known.request.key_chain.tokens_per_block
            computed = max(computed, (known.first + known.promised) * size)
            known.promised = 0
        return known.order(computed, data.num_scheduled_tokens)

    def _order_of_cached(self, data: Any) -> SaveOrder | None:
        known = self._requests.get(data.request_id)
        if known is None or not known.reported:
            return None  # reset: its blocks are not known any more
        known.extend(data, self._attachment.first_id)
        return known.order(data.computed_position, data.num_scheduled_tokens)

    def _reported_anew(self, data: Any) -> TrackedRequest | None:
        known = self._requests.get(data.request_id)
        if known is None:
            return None
        if known.reported:
            known.restart()
        if known.begins_with(np.asarray(data.new_tokens, dtype=np.int32)):
            return known
        note_doubt(Doubt.REQUEST_RESET, "its tokens are others than before")
        self._requests[data.request_id] = None
        return None

    def request_reset(self, request: Any) -> None:
        """Forgets the blocks of a request that returns to the queue.

        TensorRT-LLM asks for it again, or reports it as new again.
        """
        self._forget_loads(request)
        if (known := self._requests.get(request.request_id)) is not None:
            known.restart()

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        """Returns False: all saves of the request were staged in its steps."""
        self._forget_loads(request)
        self._requests.pop(request.request_id, None)
        return False

    def _forget_loads(self, request: Any) -> None:
        self._attachment.forget(request.request_id)
        self._loads.pop(request.request_id, None)


def _num_taken(request: Any) -> int | None:
    """Returns how many promised tokens are taken; ``None`` if unknown, as TensorRT-LLM's 0 is."""
    if isinstance(request, LlmRequest):
        return request.num_connector_matched_tokens
    return getattr(request, "py_num_connector_matched_tokens", None) or None
