"""The leader's connector, which the followers' connectors are told of."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.connector.runtime.manager import KvCacheConnectorManager
from kvconnect.engine.ranks.messages import EventKind, RequestEvent
from kvconnect.request import ExternalMatch, LlmRequest

__all__ = ["ToldConnector"]


class ToldConnector:
    """What the engine drives in place of its rank's connector manager: it notes what happens.

    The managers of the other ranks hear of it before their next step begins, in order.

    Args:
        manager: the leader's.
        kv: asks this instead of `manager` from now on.
    """

    def __init__(self, manager: KvCacheConnectorManager, kv: BaseKVCacheManager) -> None:
        self._manager = manager
        self._events: list[RequestEvent] = []
        kv.set_external_matcher(self)
        self.take_errors = manager.take_errors
        self.begin_step = manager.begin_step
        self.wait_for_layer_load = manager.wait_for_layer_load
        self.save_kv_layer = manager.save_kv_layer
        self.end_forward = manager.end_forward
        self.agree = manager.agree
        self.end_step = manager.end_step
        self.on_rewind = manager.on_rewind
        self.get_kv_transfer_params = manager.get_kv_transfer_params
        self.expects_news = manager.expects_news
        self.wait_seconds = manager.wait_seconds
        self.shutdown = manager.shutdown

    def take_events(self) -> tuple[RequestEvent, ...]:
        """What happened since the last call."""
        taken, self._events = tuple(self._events), []
        return taken

    def on_new_request(self, request: LlmRequest) -> None:
        """See `KvCacheConnectorManager`."""
        self._note(EventKind.ARRIVED, request)
        self._manager.on_new_request(request)

    def match_external(self, request: LlmRequest, num_device_tokens: int) -> ExternalMatch:
        """See `KvCacheConnectorManager`."""
        return self._manager.match_external(request, num_device_tokens)

    def blocks_allocated(
        self, request: LlmRequest, block_ids: list[int], by_group: Sequence[list[int]] = ()
    ) -> None:
        """See `KvCacheConnectorManager`."""
        self._note(EventKind.ADMITTED, request)
        self._manager.blocks_allocated(request, block_ids, by_group)

    def request_finished(self, request: LlmRequest, *, aborted: bool = False) -> bool:
        """See `KvCacheConnectorManager`."""
        self._note(EventKind.ABORTED if aborted else EventKind.FINISHED, request)
        return self._manager.request_finished(request, aborted=aborted)

    def request_reset(self, request: LlmRequest) -> None:
        """See `KvCacheConnectorManager`."""
        self._note(EventKind.RESET, request)
        self._manager.request_reset(request)

    def _note(self, kind: EventKind, request: LlmRequest) -> None:
        self._events.append(RequestEvent(kind, request.request_id, request.num_computed_tokens))
