"""SGLang's own cache controller with its threads, driven as its scheduler does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from queue import Empty
from typing import Any, TypeVar

import pytest
import torch
from device_pools import Allocator, MhaDevicePool, MlaDevicePool
from real_pools import host_pool
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang_pools import PAGE, page_content, storage_config

PAGES = 320
LIMITS = {"lookup_timeout_ms": 500, "load_timeout_s": 0.5, "save_timeout_s": 0.5}

C = TypeVar("C")


def controller_of(kind: Callable[..., C], device: Any, pool: Any, config: Any) -> C:
    """A controller of `kind` over pools on the device and the host, with the store of `config`."""
    return kind(
        Allocator(device),
        pool,
        PAGE,
        tp_group=None,
        load_cache_event=threading.Event(),
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name=config.model_name,
        storage_backend_extra_config=config.extra_config,
    )


def check_threads(controller: Any) -> None:
    """No thread of SGLang's has ended, and none has something to say."""
    for thread in (
        controller.prefetch_thread,
        controller.prefetch_io_aux_thread,
        controller.prefetch_sync_thread,
        controller.backup_thread,
    ):
        assert thread.is_alive()
    with pytest.raises(Empty):
        controller.ack_prefetch_queue.get_nowait()


class Server:
    """The part of SGLang's scheduler that backs pages up and prefetches them."""

    def __init__(self, model: Path, url: str, layout: str, *, is_mla: bool, **settings: Any):
        self.pool = host_pool(layout, is_mla=is_mla, pages=PAGES)
        device = MlaDevicePool() if is_mla else MhaDevicePool()
        config = storage_config(model, url, **(LIMITS | settings))
        self.controller = controller_of(HiCacheController, device, self.pool, config)

    @property
    def store(self) -> Any:
        """The one that loads and saves go to; healthy again."""
        return self.controller.storage_backend._access._access.store

    def flush(self) -> None:
        assert self.controller.storage_backend._access.flush(60)

    def back_up(self, tokens: list[int]) -> list[torch.Tensor]:
        """Write pages of these tokens; what they hold, which their hashes tell."""
        names = get_storage_hash_str(tokens, None, page_size=PAGE)
        where = self.pool.alloc(len(tokens))
        pages = [int(one) // PAGE for one in where[::PAGE]]
        for name, page in zip(names, pages, strict=True):
            generator = torch.Generator().manual_seed(int(name[:12], 16))
            for view in self.views(page):
                view.copy_(torch.randn(view.shape, generator=generator))
        content = [page_content(self.pool, page) for page in pages]
        self.controller.write_storage(where, tokens, names)
        self.controller.ack_backup_queue.get(timeout=60)
        self.pool.free(where)
        return content

    def prefetch(self, tokens: list[int]) -> list[torch.Tensor]:
        """What the leading pages hold that were found and loaded."""
        operation = self.controller.prefetch("request", tokens)
        assert self.controller.prefetch_hit_queue.get(timeout=60) is operation
        if not operation.storage_hit_count:
            return []
        where = self.controller.alloc_prefetch_host_buffers(operation, operation.storage_hit_count)
        for page in where[::PAGE].tolist():
            for view in self.views(page // PAGE):
                view.fill_(float("nan"))
        operation.host_indices = where
        self.controller.prefetch_buffer.put(operation)
        completed = self._completed(operation)
        pages = [int(one) // PAGE for one in where[:completed:PAGE]]
        content = [page_content(self.pool, page) for page in pages]
        self.pool.free(where)
        return content

    def _completed(self, operation: PrefetchOperation) -> int:
        completed = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=60)
            assert ack.operation is operation
            if ack.completed_req:
                return completed
            completed = ack.completed_tokens

    def views(self, page: int) -> list[torch.Tensor]:
        """All of a page, in the pool's memory."""
        planes = [self.pool.kv_buffer] if self.pool.is_mla else [*self.pool.kv_buffer]
        span = slice(page * PAGE, (page + 1) * PAGE)
        if self.pool.layout == "layer_first":
            return [plane[:, span] for plane in planes]
        at = span if self.pool.layout == "page_first" else page
        return [plane[at] for plane in planes]

    def check_alive(self) -> None:
        """No thread of SGLang's has ended, and every page is free again."""
        check_threads(self.controller)
        assert self.pool.available_size() == self.pool.size

    def close(self) -> None:
        self.controller.detach_storage_backend()
