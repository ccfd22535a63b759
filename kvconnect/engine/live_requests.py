"""The requests that an engine has, how they end, and their counts."""

from __future__ import annotations

from collections.abc import Iterator

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.engine.attachment import Attachment
from kvconnect.engine.explainer import Explainer
from kvconnect.engine.request.live_request import LiveRequest
from kvconnect.engine.request.output import EngineStats
from kvconnect.engine.request.stops import FinishReason
from kvconnect.engine.sampling.sampler import Sampler
from kvconnect.engine.scheduler import Scheduler
from kvconnect.request import LlmRequest, RequestState, ScheduledBatch
from kvconnect.trace import count


class LiveRequests:
    """The requests from their arrival to their end; belongs to the engine's thread.

    Args:
        kv: the cache manager of their blocks.
        connector: is notified of each end, and reports errors of single requests.
        scheduler: the scheduler of these requests.
        sampler: keeps state for each.
        explainer: is notified of each end.

    Attributes:
        stats: the counts since the start, and the last count of blocks.
    """

    def __init__(
        self,
        kv: BaseKVCacheManager,
        connector: Attachment,
        scheduler: Scheduler,
        sampler: Sampler,
        explainer: Explainer,
    ) -> None:
        self._kv = kv
        self._connector = connector
        self._scheduler = scheduler
        self._sampler = sampler
        self._explainer = explainer
        self._live: dict[int, LiveRequest] = {}
        self._errors: dict[int, Exception] = {}  # errors that will end live requests
        self.stats = EngineStats(max_blocks=kv.get_max_resource_count())
        self.recount_blocks()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Iterates over a copy of the requests, which may end meanwhile."""
        return iter([*self._live.values()])

    def __getitem__(self, request_id: int) -> LiveRequest:
        return self._live[request_id]

    def get(self, request_id: int) -> LiveRequest | None:
        """Returns the request of this id; ``None``: it has ended."""
        return self._live.get(request_id)

    def add(self, live: LiveRequest) -> None:
        """Adds `live`."""
        self._live[live.request.request_id] = live

    # ------------------------------------------------------------------ their end

    def finish(self, live: LiveRequest, reason: FinishReason) -> None:
        """Ends `live` and notifies its waiter."""
        live.request.note_end(reason)
        self._let_go(live, aborted=reason == "abort")
        self._count(live.request)
        self._errors |= self._connector.take_errors()
        try:
            if error := self._errors.pop(live.request.request_id, None):
                live.fail(error)
            else:
                live.finish(reason)
        except Exception as error:  # noqa: BLE001  no output can be made of it
            live.fail(error)
        del self._live[live.request.request_id]  # last: requests in there are notified of errors

    def fail(self, live: LiveRequest, error: Exception) -> None:
        """Ends `live` by an error of its own, and notifies its waiter."""
        live.request.note_end("error")
        self._let_go(live, aborted=True)
        live.fail(error)
        del self._live[live.request.request_id]

    def note_error(self, live: LiveRequest, error: Exception) -> None:
        """Records `error`, by which `end_failed` will end `live`."""
        self._errors[live.request.request_id] = error

    def end_failed(self, batch: ScheduledBatch | None = None) -> bool:
        """Ends requests with errors, also out of `batch`; returns whether there were any."""
        self._errors |= self._scheduler.take_errors() | self._connector.take_errors()
        errors, self._errors = self._errors, {}
        failed = [live for one in errors if (live := self._live.get(one)) is not None]
        for live in failed:
            self.fail(live, errors[live.request.request_id])
        if failed and batch is not None:
            batch.drop({live.request.request_id for live in failed})
        return bool(failed)

    def fail_all(self, error: BaseException) -> None:
        """Fails every waiter by `error`, without releasing blocks; callable on any thread."""
        for live in self:
            live.fail(error)

    def _let_go(self, live: LiveRequest, *, aborted: bool) -> None:
        """Removes `live` from the engine; its blocks are released, now or once they are saved."""
        request = live.request
        holds_blocks = request.state is not RequestState.QUEUED
        self._scheduler.remove(request)
        self._sampler.forget(request)
        keep = self._connector.request_finished(request, aborted=aborted)
        request.kv_transfer_params = (
            self._connector.get_kv_transfer_params(request) or request.kv_transfer_params
        )
        if keep:
            self._kv.publish_ended(request)
            request.state = RequestState.SAVING
            self._scheduler.saving[request.request_id] = request
        else:
            request.state = RequestState.FINISHED
            if holds_blocks:
                self._kv.free_resources(request)
        self.recount_blocks()  # before the waiter is notified, since it may read the counts

    # ------------------------------------------------------------------ what is counted

    def recount_blocks(self) -> bool:
        """Counts the blocks; returns whether more are free, since transfers free blocks, too."""
        before = self.stats.free_blocks
        self.stats.free_blocks = self._kv.get_num_free_blocks()
        self.stats.max_blocks = self._kv.get_max_resource_count()
        return self.stats.free_blocks > before

    def _count(self, request: LlmRequest) -> None:
        stats = self.stats
        stats.finished_requests += 1
        stats.prompt_tokens += request.prompt_len
        stats.generated_tokens += request.num_generated_tokens
        stats.computed_tokens += request.computed_tokens
        stats.reused_device_tokens += request.reused_device_tokens
        stats.reused_host_tokens += request.reused_host_tokens
        stats.reused_store_tokens += request.reused_store_tokens
        count(
            "engine.request",
            (),
            prompt_tokens=request.prompt_len,
            device_tokens=request.reused_device_tokens - request.reused_host_tokens,
            host_tokens=request.reused_host_tokens,
            store_tokens=request.reused_store_tokens,
            **self._explainer.ended(request),
        )

    def sizes(self) -> dict[str, float]:
        """Returns gauges: blocks at the end of the last step. Callable on any thread."""
        free, most = self.stats.free_blocks, self.stats.max_blocks
        scheduler = self._scheduler
        return {
            "engine.blocks.free": free,
            "engine.blocks.used": max(0, most - free),
            "engine.requests.waiting": len(scheduler.waiting),
            "engine.requests.running": len(scheduler.running),
            "engine.requests.loading": len(scheduler.loading),
            "engine.requests.saving": len(scheduler.saving),
        }
