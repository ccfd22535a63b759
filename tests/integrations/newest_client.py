"""A connector as one is written for TensorRT-LLM's main branch: prefixes that it can reserve.

Its imports, arguments and methods are TensorRT-LLM's; nothing of kvconnect is named. It keeps
blocks in the process, by whole prefixes and the request's salt.
"""

from __future__ import annotations

import torch
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    SchedulerOutput,
)
from tensorrt_llm._torch.pyexecutor.connectors.kv_cache_layout import valid_page_slots
from tensorrt_llm.bindings.internal.batch_manager import LlmRequest
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

BLOCKS: dict[object, torch.Tensor] = {}
CALLS: list[str] = []


class NewestWorker(KvCacheConnectorWorker):
    def __init__(self, llm_args: TorchLlmArgs):
        super().__init__(llm_args)
        self.finished_prefix_loads = []

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor):
        CALLS.append("register_kv_caches")
        self.pool = kv_cache_tensor

    def start_load_kv(self, stream):
        loads, _, reserved = self._metadata
        for key, block in loads:
            self.pool[block].copy_(BLOCKS[key])
        self.finished_prefix_loads += reserved

    def get_finished_prefix_loads(self) -> list[int]:
        finished, self.finished_prefix_loads = self.finished_prefix_loads, []
        return finished

    def wait_for_layer_load(self, layer_idx, stream):
        pass

    def save_kv_layer(self, layer_idx, stream):
        pass

    def wait_for_save(self, stream):
        stream.synchronize()
        for key, block in self._metadata[1]:
            BLOCKS.setdefault(key, self.pool[block].cpu())

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        return [], []


class NewestLeader(KvCacheConnectorScheduler):
    supports_attention_dp = False

    def __init__(self, llm_args: TorchLlmArgs):
        super().__init__(llm_args)
        self.size = llm_args.kv_cache_config.tokens_per_block
        self.pending = {}

    def wait_for_initialization(self):
        CALLS.append("wait_for_initialization")

    def build_connector_meta(self, scheduler_output: SchedulerOutput):
        assert scheduler_output.attention_dp_rank is None
        loads, saves = [], []
        reserved = [load.reservation_id for load in scheduler_output.prefix_loads]
        for new in scheduler_output.new_requests:
            slots = dict(valid_page_slots(new.new_block_ids))
            assert [*valid_page_slots(new.new_block_ids_by_layer_group[0])] == [*slots.items()]
            first = new.computed_position // self.size
            keys = self.pending.pop(new.request_id, [])
            loads += [(key, slots[number]) for number, key in enumerate(keys, first)]
            computed = new.computed_position + len(keys) * self.size + new.num_scheduled_tokens
            for number in range(first + len(keys), min(len(new.new_tokens), computed) // self.size):
                prefix = tuple(new.new_tokens[: (number + 1) * self.size])
                saves.append(((new.cache_salt, prefix), slots[number]))
        return loads, saves, reserved

    def get_num_new_matched_tokens(self, request: LlmRequest, num_computed_tokens: int):
        found = self.pending[request.request_id] = []
        if num_computed_tokens % self.size:
            return 0, False
        tokens = request.get_tokens(0)
        for end in range(num_computed_tokens + self.size, len(tokens) + 1, self.size):
            key = (request.cache_salt, tuple(tokens[:end]))
            if key not in BLOCKS:
                break
            found.append(key)
        return len(found) * self.size, False

    def reserve_prefix(self, request, num_computed_tokens, reservation_id):
        CALLS.append("reserve_prefix")
        return 0, False

    def release_prefix_reservation(self, request, reservation_id, start, end):
        CALLS.append("release_prefix_reservation")

    def request_finished(self, request, cache_block_ids):
        return False

    def update_state_after_alloc(self, request, block_ids):
        pass


class OtherFormWorker(NewestWorker):
    """Also for several layer groups, by TensorRT-LLM's own type."""

    def register_kv_cache_layout(self, layout):
        for group in layout.groups:
            assert group.regions


class OtherFormLeader(NewestLeader):
    """For several layer groups alone."""

    update_state_after_alloc = KvCacheConnectorScheduler.update_state_after_alloc

    def update_state_after_alloc_by_layer_group(self, request, block_ids_by_layer_group):
        pass
