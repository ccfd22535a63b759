"""A connector as one is written for TensorRT-LLM, by its documentation: a file per block and rank.

Its imports, constructor, arguments and methods are TensorRT-LLM's; nothing of kvconnect is named.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tensorrt_llm import logger
from tensorrt_llm._torch.pyexecutor.kv_cache_connector import (
    KvCacheConnectorScheduler,
    KvCacheConnectorWorker,
    SchedulerOutput,
)
from tensorrt_llm.bindings.internal.batch_manager import LlmRequest
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs

FOLDER = "PERSISTENT_CLIENT_FOLDER"


@dataclass
class Blocks:
    """Files and block ids."""

    load: list[tuple[str, int]] = field(default_factory=list)
    save: list[tuple[str, int]] = field(default_factory=list)


class PersistentWorker(KvCacheConnectorWorker):
    loaded = 0

    def __init__(self, llm_args: TorchLlmArgs):
        super().__init__(llm_args)
        self.pool = None
        self.rank = llm_args.parallel_config.to_mapping().rank

    def own(self, path: str) -> str:
        return f"{path}.{self.rank}"

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor):
        assert self.pool is None
        self.pool = kv_cache_tensor

    def start_load_kv(self, stream: torch.cuda.Stream):
        for path, block in self._metadata.load:
            self.pool[block].copy_(torch.load(self.own(path)), non_blocking=False)
            PersistentWorker.loaded += 1

    def wait_for_layer_load(self, layer_idx: int, stream: torch.cuda.Stream):
        pass

    def save_kv_layer(self, layer_idx: int, stream: torch.cuda.Stream):
        pass

    def wait_for_save(self, stream: torch.cuda.Stream):
        stream.synchronize()
        for path, block in self._metadata.save:
            if not Path(self.own(path)).exists():
                torch.save(self.pool[block].cpu(), self.own(path))

    def get_finished(self, finished_gen_req_ids, started_loading_req_ids):
        return [], []


class PersistentLeader(KvCacheConnectorScheduler):
    def __init__(self, llm_args: TorchLlmArgs):
        super().__init__(llm_args)
        self.size = self._llm_args.kv_cache_config.tokens_per_block
        self.world_size = llm_args.parallel_config.to_mapping().world_size
        self.pending: dict[int, list[str]] = {}

    def file(self, prefix: list[int]) -> str:
        name = hashlib.sha256(repr(prefix).encode()).hexdigest()
        return str(Path(os.environ[FOLDER]) / name)

    def get_num_new_matched_tokens(self, request: LlmRequest, num_computed_tokens: int):
        found = self.pending[request.request_id] = []
        tokens = request.get_tokens(0)
        for end in range(num_computed_tokens + self.size, len(tokens) + 1, self.size):
            path = self.file(tokens[:end])
            if not all(Path(f"{path}.{rank}").exists() for rank in range(self.world_size)):
                break
            found.append(path)
        logger.info(f"matched {len(found)} blocks of request {request.request_id}")
        return len(found) * self.size, False

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]):
        pass

    def build_connector_meta(self, scheduler_output: SchedulerOutput):
        blocks = Blocks()
        for new in scheduler_output.new_requests:
            first = new.computed_position // self.size
            loads = self.pending.pop(new.request_id, [])
            blocks.load += zip(loads, new.new_block_ids[first:], strict=False)
            for number in range(first + len(loads), len(new.new_tokens) // self.size):
                prefix = new.new_tokens[: (number + 1) * self.size]
                blocks.save.append((self.file(prefix), new.new_block_ids[number]))
        return blocks

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        return False
