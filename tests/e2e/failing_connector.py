"""A connector whose loads bring garbage and fail after the last layer, each in its own way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvconnect.connector.data import Direction, LlmArgs, SchedulerOutput, TransferFailure
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.request import LlmRequest


@dataclass
class Behaviour:
    """What the next connector does; the tests set it."""

    num_tokens: int = 64
    in_background: bool = False
    num_valid: int = 0
    writes_ended: bool = True
    asked: int = 0
    late_blocks: list[int] = field(default_factory=list)
    may_return: threading.Event = field(default_factory=threading.Event)


behaviour = Behaviour()


class FailingScheduler(KvCacheConnectorScheduler):
    """Offers tokens to every first request, and nothing to later ones."""

    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self.loads: dict[int, list[int]] = {}

    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        behaviour.asked += 1
        if behaviour.asked > 1:
            return 0, False
        return behaviour.num_tokens, behaviour.in_background

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        if behaviour.asked == 1 and request.request_id not in self.loads:
            blocks = -(-behaviour.num_tokens // request.key_chain.tokens_per_block)
            self.loads[request.request_id] = block_ids[:blocks]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> object:
        wanted = scheduler_output.new_requests + scheduler_output.loading_requests
        loads = {one.request_id: self.loads.get(one.request_id, []) for one in wanted}
        for request_id in self.loads:
            self.loads[request_id] = []
        return {request_id: blocks for request_id, blocks in loads.items() if blocks}

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        return False


class FailingWorker(KvCacheConnectorWorker):
    """Fills the blocks with garbage while the model runs, and says so at the end."""

    wakes = True

    def register_kv_caches(self, kv_cache_tensor: Tensor) -> None:
        self.pool = kv_cache_tensor
        self.pending: dict[int, list[int]] = {}
        self.unreturned: list[int] = []
        self.wake: Callable[[], None] = lambda: None

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self.wake = wakeup

    def start_load_kv(self, stream: torch.cuda.Stream | None) -> None:
        loads = self.get_connector_meta()
        assert isinstance(loads, dict)
        self.pending.update(loads)
        self._scribble()

    def wait_for_layer_load(self, layer_idx: int, stream: torch.cuda.Stream | None) -> None:
        self._scribble()

    def save_kv_layer(self, layer_idx: int, stream: torch.cuda.Stream | None) -> None:
        pass

    def wait_for_save(self, stream: torch.cuda.Stream | None) -> None:
        self._scribble()

    def get_failed(self) -> list[TransferFailure]:
        failed = [
            TransferFailure(
                one, Direction.LOAD, behaviour.num_valid, "planted", behaviour.writes_ended
            )
            for one in self.pending
        ]
        if not behaviour.writes_ended:
            for request_id, blocks in self.pending.items():
                behaviour.late_blocks += blocks
                self.unreturned.append(request_id)
        self.pending.clear()
        return failed

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        # Late writes go on in every step until the id is returned.
        self.pool[behaviour.late_blocks] = 7.0
        if self.unreturned and behaviour.may_return.is_set():
            returned, self.unreturned = self.unreturned, []
            behaviour.late_blocks.clear()
            return [], returned
        return [], []

    def _scribble(self) -> None:
        for blocks in self.pending.values():
            self.pool[blocks] = 13.0
