"""vLLM's own offloading on a CPU: its scheduler and managers as they are, its copies replaced.

Its worker copies with CUDA streams, so vLLM refuses offloading on a CPU. Here numpy copies instead,
at once, in the same places: everything else, tiers above all, is vLLM's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from typing_extensions import override
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

managers: list[Any] = []
"""The tiering managers of this process, the newest last: tests look at them."""


class CopyingWorker(OffloadingWorker):
    """Copies blocks between vLLM's cache and its host memory, before the call returns."""

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        self._region = region
        self._per_chunk = blocks_per_chunk
        self._groups = kv_caches.group_data_refs
        self._blocks = [one.tensor.numpy() for one in kv_caches.tensors]
        pages = [one.page_size_bytes for one in kv_caches.tensors]
        self._rows = [
            region.create_next_worker_view(page * blocks_per_chunk).numpy() for page in pages
        ]
        self._pages = pages
        self._finished: list[TransferResult] = []

    def _places(
        self, blocks: GPULoadStoreSpec, chunks: CPULoadStoreSpec
    ) -> Iterator[tuple[int, int, int, int]]:
        """Group, block, chunk and place in the chunk of every block that is copied."""
        ids, rows = iter(blocks.block_ids.tolist()), iter(chunks.chunk_ids.tolist())
        for group, size in enumerate(blocks.group_sizes):
            first = blocks.block_indices[group] if size else 0
            row = -1
            for number in range(first, first + size):
                if number == first or number % self._per_chunk == 0:
                    row = next(rows)
                yield group, next(ids), row, number % self._per_chunk

    def _copy(
        self, job: int, blocks: GPULoadStoreSpec, chunks: CPULoadStoreSpec, *, load: bool
    ) -> bool:
        start, nbytes = time.perf_counter(), 0
        for group, block, row, place in self._places(blocks, chunks):
            for ref in self._groups[group]:
                page = self._pages[ref.tensor_idx]
                on_host = self._rows[ref.tensor_idx][row][place * page : (place + 1) * page]
                in_cache = self._blocks[ref.tensor_idx][block]
                np.copyto(*((in_cache, on_host) if load else (on_host, in_cache)))
                nbytes += page
        seconds = time.perf_counter() - start
        self._finished.append(TransferResult(job, True, nbytes, seconds))
        return True

    @override
    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, load=False)

    @override
    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, dst_spec, src_spec, load=True)

    @override
    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    @override
    def wait(self, job_ids: set[int]) -> None:
        """Every copy is over when its call returns."""

    @override
    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()


class OffloadOnCpu(TieringOffloadingSpec):
    """Selected with ``spec_name`` and ``spec_module_path``."""

    @override
    def get_manager(self) -> Any:
        manager = super().get_manager()
        if manager not in managers:
            managers.append(manager)
        return manager

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
