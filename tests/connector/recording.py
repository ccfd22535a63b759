"""A connector that writes down every call and answers what a test told it to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.data import (
    Direction,
    KvCachePool,
    LlmArgs,
    SchedulerOutput,
    TransferFailure,
)
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.request import LlmRequest


class Script:
    """What the connector answers, and what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.match: Callable[[LlmRequest, int], object] = lambda _request, _position: (0, False)
        self.keep: Callable[[LlmRequest], object] = lambda _: False
        self.meta: Callable[[SchedulerOutput], object] = lambda _: "meta"
        self.finished: Callable[[list[int], list[int]], object] = lambda saved, loaded: (
            saved,
            loaded,
        )
        self.failures: list[TransferFailure] = []
        self.progress: object = {}
        self.scheduler: Recorder | None = None
        self.worker: RecordingWorker | None = None

    def note(self, name: str, *args: object) -> None:
        self.calls.append((name, *args))

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """The arguments of every call of `name`."""
        return [call[1:] for call in self.calls if call[0] == name]

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    @property
    def outputs(self) -> list[SchedulerOutput]:
        """What `build_connector_meta` was given, step by step."""
        return [call[0] for call in self.named("build_connector_meta")]


script = Script()


def fresh_script() -> Script:
    """A new script for whatever is built from now on."""
    global script  # noqa: PLW0603
    script = Script()
    return script


def never(_saving: list[int], _loading: list[int]) -> tuple[list[int], list[int]]:
    """No transfer ends."""
    return [], []


def fail(request: LlmRequest, valid: int, *, ended: bool = True) -> TransferFailure:
    """A load that failed behind `valid` tokens."""
    return TransferFailure(request.request_id, Direction.LOAD, valid, "planted", ended)


def config(
    worker: str = "RecordingWorker", scheduler: str = "Recorder", **settings: object
) -> KvCacheConnectorConfig:
    """The configuration that names this connector."""
    return KvCacheConnectorConfig(
        connector_module="recording",
        connector_scheduler_class=scheduler,
        connector_worker_class=worker,
        **settings,
    )


class Recorder(KvCacheConnectorScheduler):
    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self.script = script
        script.scheduler = self

    def on_new_request(self, request: LlmRequest) -> None:
        self.script.note("on_new_request", request.request_id)

    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        self.script.note("get_num_new_matched_tokens", request.request_id, num_computed_tokens)
        return self.script.match(request, num_computed_tokens)  # type: ignore[return-value]

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        self.script.note("update_state_after_alloc", request.request_id, list(block_ids))

    def blocks_replaced(self, request: LlmRequest, block_ids: list[int]) -> None:
        self.script.note("blocks_replaced", request.request_id, list(block_ids))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        self.script.note("build_connector_meta", copy.deepcopy(scheduler_output))
        return self.script.meta(scheduler_output)

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        self.script.note("request_finished", request.request_id, list(cache_block_ids))
        return self.script.keep(request)  # type: ignore[return-value]

    def request_reset(self, request: LlmRequest) -> None:
        self.script.note("request_reset", request.request_id)

    def request_aborted(self, request: LlmRequest) -> None:
        self.script.note("request_aborted", request.request_id)

    def load_failed(self, request: LlmRequest, num_valid_tokens: int) -> None:
        self.script.note("load_failed", request.request_id, num_valid_tokens)

    def on_rewind(self, request: LlmRequest, block_ids: list[int]) -> None:
        self.script.note("on_rewind", request.request_id, list(block_ids))

    def shutdown(self) -> None:
        self.script.note("scheduler.shutdown")


class OverlappingRecorder(Recorder):
    """Its loads in the background bring the last block first."""

    def load_overlaps(self, request: LlmRequest) -> bool:
        self.script.note("load_overlaps", request.request_id)
        return True


class RecordingWorker(KvCacheConnectorWorker):
    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self.script = script
        script.worker = self

    def register_kv_cache_layout(self, pools: Sequence[KvCachePool]) -> None:
        super().register_kv_cache_layout(pools)

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        self.script.note("register_kv_caches", tuple(kv_cache_tensor.shape))
        self.pool = kv_cache_tensor

    def bind_connector_meta(self, metadata: object) -> None:
        super().bind_connector_meta(metadata)
        self.script.note("bind_connector_meta", metadata)

    def start_load_kv(self, stream: object) -> None:
        self.script.note("start_load_kv", self.get_connector_meta())

    def wait_for_layer_load(self, layer_idx: int, stream: object) -> None:
        self.script.note("wait_for_layer_load", layer_idx)

    def save_kv_layer(self, layer_idx: int, stream: object) -> None:
        self.script.note("save_kv_layer", layer_idx)

    def wait_for_save(self, stream: object) -> None:
        self.script.note("wait_for_save", self._metadata)

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        self.script.note("get_finished", finished_gen_req_ids, started_loading_req_ids)
        return self.script.finished(finished_gen_req_ids, started_loading_req_ids)  # type: ignore[return-value]

    def get_failed(self) -> list[TransferFailure]:
        failures, self.script.failures = self.script.failures, []
        return failures

    def get_load_progress(self) -> Mapping[int, int]:
        return self.script.progress  # type: ignore[return-value]

    def cancel(self, request_id: int) -> None:
        self.script.note("cancel", request_id)

    def shutdown(self) -> None:
        self.script.note("worker.shutdown")


class PoolsWorker(RecordingWorker):
    """Takes several pools."""

    def register_kv_cache_layout(self, pools: Sequence[KvCachePool]) -> None:
        self.script.note("register_kv_cache_layout", list(pools))
