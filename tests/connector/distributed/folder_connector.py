"""A connector as people write it for TensorRT-LLM: files in a folder, one for each block and rank.

It uses nothing but the methods of TensorRT-LLM's classes, and what they are built with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kvconnect.connector.data import LlmArgs, SchedulerOutput
from kvconnect.connector.scheduler import KvCacheConnectorScheduler
from kvconnect.connector.worker import KvCacheConnectorWorker
from kvconnect.request import LlmRequest

folder = Path()


@dataclass
class Orders:
    """Names of blocks, and their ids."""

    load: list[tuple[str, int]] = field(default_factory=list)
    save: list[tuple[str, int]] = field(default_factory=list)


def name_of(tokens: list[int]) -> str:
    return "-".join(map(str, tokens))


class FolderScheduler(KvCacheConnectorScheduler):
    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self._size = self._llm_args.kv_cache_config.tokens_per_block
        self._loads: dict[int, list[tuple[str, int]]] = {}
        self._found: dict[int, list[str]] = {}

    def get_num_new_matched_tokens(
        self, request: LlmRequest, num_computed_tokens: int
    ) -> tuple[int, bool]:
        tokens, names = request.get_tokens(0), []
        first = num_computed_tokens // self._size
        for block in range(first, (len(tokens) - 1) // self._size):
            name = name_of(tokens[: (block + 1) * self._size])
            ranks = range(self._llm_args.parallel_config.to_mapping().world_size)
            if not all((folder / f"{name}.{rank}.npy").exists() for rank in ranks):
                break
            names.append(name)
        self._found[request.request_id] = names
        return len(names) * self._size, False

    def update_state_after_alloc(self, request: LlmRequest, block_ids: list[int]) -> None:
        names = self._found.pop(request.request_id)
        self._loads[request.request_id] = list(zip(names, block_ids, strict=False))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Orders:
        orders = Orders()
        for data in scheduler_output.new_requests:
            loads = self._loads.pop(data.request_id)
            orders.load += loads
            full = len(data.new_tokens) // self._size
            for block in range(len(loads), full):
                name = name_of(data.new_tokens[: (block + 1) * self._size])
                orders.save.append((name, data.new_block_ids[block]))
        return orders

    def request_finished(self, request: LlmRequest, cache_block_ids: list[int]) -> bool:
        return False


class FolderWorker(KvCacheConnectorWorker):
    def __init__(self, llm_args: LlmArgs) -> None:
        super().__init__(llm_args)
        self._rank = self._llm_args.parallel_config.to_mapping().rank

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        self._pool = kv_cache_tensor

    def start_load_kv(self, stream: object) -> None:
        for name, block in self._metadata.load:  # type: ignore[attr-defined]
            stored = np.load(folder / f"{name}.{self._rank}.npy")
            self._pool[block].copy_(torch.from_numpy(stored))

    def wait_for_layer_load(self, layer_idx: int, stream: object) -> None:
        pass

    def save_kv_layer(self, layer_idx: int, stream: object) -> None:
        pass

    def wait_for_save(self, stream: object) -> None:
        stream.synchronize()  # type: ignore[attr-defined]
        for name, block in self._metadata.save:  # type: ignore[attr-defined]
            np.save(folder / f"{name}.{self._rank}.npy", self._pool[block].numpy())

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        return [], []
