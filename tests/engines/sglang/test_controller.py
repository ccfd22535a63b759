"""SGLang's own cache controller, its threads and host pools, over stores that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here: make test-engines")

from device_pools import Allocator, MhaDevicePool, MlaDevicePool
from faulty_store import STORES
from real_pools import host_pool
from sglang.srt.managers.cache_controller import HiCacheController, PrefetchOperation
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang_pools import PAGE, page_content

from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.testing.faults.faulty_backend import BACKEND_FAULTS

PAGES = 320
PROMPT = list(range(1, 10 * PAGE + 1))
"""Ten pages."""
LIMITS = {"lookup_timeout_ms": 500, "load_timeout_s": 0.5, "save_timeout_s": 0.5}
POOLS = [(False, "page_head"), (True, "layer_first")]
"""Whether a pool holds latents, and its layout."""


class Server:
    """The part of SGLang's scheduler that backs pages up and prefetches them."""

    def __init__(self, model: Path, url: str, layout: str, *, is_mla: bool, **settings: Any):
        self.pool = host_pool(layout, is_mla=is_mla, pages=PAGES)
        device = MlaDevicePool() if is_mla else MhaDevicePool()
        self.controller = HiCacheController(
            Allocator(device),
            self.pool,
            PAGE,
            tp_group=None,
            load_cache_event=threading.Event(),
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name=str(model),
            storage_backend_extra_config={
                "backend_name": "kvconnect",
                "module_path": "kvconnect.integrations.sglang",
                "class_name": "KvConnectStorage",
                "interface_v1": 1,
                "url": url,
                "staging_bytes": 1 << 20,
                **LIMITS,
                **settings,
            },
        )

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
        controller = self.controller
        for thread in (
            controller.prefetch_thread,
            controller.prefetch_io_aux_thread,
            controller.prefetch_sync_thread,
            controller.backup_thread,
        ):
            assert thread.is_alive()
        assert self.pool.available_size() == self.pool.size
        with pytest.raises(Empty):
            controller.ack_prefetch_queue.get_nowait()

    def close(self) -> None:
        self.controller.detach_storage_backend()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("sglang") / "model", "llama", num_layers=2)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """What SGLang's launcher publishes."""
    with get_parallel().override(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0
    ):
        yield


@pytest.fixture(scope="module", params=POOLS, ids=lambda one: f"{'mla' * one[0]}{one[1]}")
def server(request, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """On a faulty store."""
    is_mla, layout = request.param
    made = Server(model, f"faulty://{tmp_path_factory.mktemp('store')}", layout, is_mla=is_mla)
    yield made
    made.close()


@pytest.fixture
def healthy(server: Server) -> Server:
    """The same, once its store is used again after the fault before."""
    heal(server)
    return server


def heal(server: Server) -> None:
    """Until lookups are waited for again, and no call is refused."""
    access = server.controller.storage_backend._access
    server.store.io.call_soon(STORES[""].heal)
    until = time.monotonic() + 60
    while not server.store.backend.available or access._budget.suspended:
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("fault", [one for one in BACKEND_FAULTS if one != "none"])
def test_what_is_prefetched_from_a_failing_store_is_what_was_backed_up(healthy, fault):
    server, store = healthy, STORES[""]
    tokens = [*PROMPT, *[BACKEND_FAULTS.index(fault) + 1] * PAGE]
    written = server.back_up(tokens)
    server.flush()
    assert all(map(torch.equal, got := server.prefetch(tokens), written))
    assert len(got) == len(written)
    for operations in ({"lookup", "load", "save"}, {"load"}, {"lookup"}):
        store._operations = frozenset(operations)
        hits = store.hits
        server.store.io.call_soon(lambda: store.set(fault))
        until = time.monotonic() + 60
        while store.hits < hits + 2:  # calls of the fault before, which end now, open the breaker
            assert time.monotonic() < until
            got = server.prefetch(tokens)
            assert len(got) <= len(written)
            assert all(map(torch.equal, got, written))
            server.back_up(tokens)  # damaged pages are dropped from the store
        heal(server)
        server.check_alive()
    until = time.monotonic() + 60
    while len(again := server.prefetch(tokens)) < len(written):
        # The breaker closes with the first call that succeeds; what was damaged is written anew.
        assert time.monotonic() < until
        server.back_up(tokens)
    assert all(map(torch.equal, again, written))
    server.check_alive()


@pytest.mark.planted("paused", "sglang", "hit")
def test_a_flush_of_sglang_s_cache_keeps_what_is_stored(healthy):
    server = healthy
    written = server.back_up([*PROMPT, *[77] * PAGE])
    server.flush()
    server.controller.reset()
    got = server.prefetch([*PROMPT, *[77] * PAGE])
    assert len(got) == len(written)
    assert all(map(torch.equal, got, written))
    server.check_alive()


def test_prompts_of_several_batches(healthy):
    """SGLang asks for 128 pages at a time."""
    server = healthy
    tokens = list(range(1000, 1000 + 280 * PAGE))
    written = server.back_up(tokens)
    server.flush()
    got = server.prefetch([*tokens, *range(8 * PAGE)])
    assert len(got) == 280
    assert all(map(torch.equal, got, written))
    server.check_alive()
