"""SGLang's own controller of hybrid models, its threads and host pools: pages and states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang", reason="SGLang is not installed here: make test-engines")

from device_pools import MhaDevicePool
from real_controller import check_threads, controller_of
from real_pools import host_pool, state_pool
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang_pools import (
    PAGE,
    fill,
    fill_states,
    indices,
    page_content,
    state_content,
    storage_config,
)

from kvconnect.keys import store_key

pytestmark = pytest.mark.usefixtures("one_rank")

PROMPT = list(range(1, 6 * PAGE + 1))
"""Six pages."""


class HybridServer:
    """The part of SGLang's scheduler that backs up and prefetches pages with a state."""

    def __init__(self, model: Path, url: str) -> None:
        self.pages, self.states = host_pool("page_first"), state_pool()
        fill(self.pages, 1)
        fill_states(self.states, 1)
        device, entry = MhaDevicePool(), {"layer_mapper": lambda layer: layer}
        group = HostPoolGroup(
            [
                PoolEntry(PoolName.KV, self.pages, device, is_primary_index_anchor=True, **entry),
                PoolEntry(PoolName.MAMBA, self.states, device, **entry),
            ]
        )
        config = storage_config(model, url)
        self.controller = controller_of(HybridCacheController, device, group, config)
        self.storage = self.controller.storage_backend

    def back_up(self, tokens: list[int], *, slot: int) -> None:
        """Writes pages 0, 1, … as those of `tokens`, and `slot` as the state at their end."""
        names = get_storage_hash_str(tokens, None, page_size=PAGE)
        state = PoolTransfer(
            name=PoolName.MAMBA,
            host_indices=torch.tensor([slot]),
            keys=[names[-1]],
            hit_policy=PoolHitPolicy.TRAILING_PAGES,
        )
        self.controller.write_storage(
            indices(range(len(names))), tokens, names, extra_pools=[state]
        )
        done = self.controller.ack_backup_queue.get(timeout=60)
        assert done.completed_tokens == len(tokens)
        assert done.pool_storage_result.extra_pool_hit_pages == {PoolName.MAMBA: 1}
        assert self.storage._access.flush(60)

    def prefetch(self, tokens: list[int], *, slot: int) -> tuple[int, int, bool]:
        """Loads pages to the places from page 6 on, and the state at their end to `slot`.

        Returns the pages that were found, and the pages and whether the state was loaded.
        """
        state = PoolTransfer(
            name=PoolName.MAMBA, keys=["__placeholder__"], hit_policy=PoolHitPolicy.TRAILING_PAGES
        )
        operation = self.controller.prefetch(
            SimpleNamespace(rid="request"), tokens, extra_pools=[state]
        )
        assert self.controller.prefetch_hit_queue.get(timeout=60) is operation
        if not (found := operation.storage_hit_count // PAGE):
            return 0, 0, False
        operation.host_indices = indices(range(6, 6 + found))
        state.host_indices = torch.tensor([slot])
        self.controller.prefetch_buffer.put(operation)
        completed, hits = 0, {}
        while not (ack := self.controller.ack_prefetch_queue.get(timeout=60)).completed_req:
            completed = ack.completed_tokens or completed
            hits |= ack.pool_hits or {}
        return found, completed // PAGE, hits.get(PoolName.MAMBA, 0) == 1

    def delete(self, name: str, group: int) -> None:
        """Removes a block from the store."""
        store = self.storage._access._access.store
        (key,) = self.storage._keys([name])
        store.io.submit(store.backend.delete([store_key(key, group)])).result()


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[HybridServer]:
    made = HybridServer(model, f"disk://{tmp_path}/kv?capacity=64MiB")
    yield made
    check_threads(made.controller)
    made.controller.detach_storage_backend()


def test_a_prompt_comes_back_up_to_its_last_state(server: HybridServer):
    pages = [page_content(server.pages, page) for page in range(6)]
    states = [state_content(server.states, slot) for slot in range(2)]
    server.back_up(PROMPT[: 3 * PAGE], slot=0)
    server.back_up(PROMPT, slot=1)
    server.controller.reset()
    longer = [*PROMPT, *range(900, 900 + PAGE)]
    for tokens, num_pages, slot in ((longer, 6, 1), (PROMPT[: 5 * PAGE], 3, 0)):
        assert server.prefetch(tokens, slot=4) == (num_pages, num_pages, True)
        for number in range(num_pages):
            assert torch.equal(page_content(server.pages, 6 + number), pages[number])
        assert torch.equal(state_content(server.states, 4), states[slot])
    assert server.prefetch(PROMPT[: 2 * PAGE], slot=4) == (0, 0, False)


def test_without_its_state_or_a_page_a_prompt_ends_before(server: HybridServer):
    names = get_storage_hash_str(PROMPT, None, page_size=PAGE)
    server.back_up(PROMPT[: 3 * PAGE], slot=0)
    server.back_up(PROMPT, slot=1)
    server.delete(names[5], group=1)
    assert server.prefetch(PROMPT, slot=4) == (3, 3, True)
    assert torch.equal(state_content(server.states, 4), state_content(server.states, 0))
    server.back_up(PROMPT, slot=1)
    assert server.prefetch(PROMPT, slot=4) == (6, 6, True)
    server.delete(names[4], group=0)
    assert server.prefetch(PROMPT, slot=4) == (3, 3, True)


def test_a_state_that_is_gone_after_the_lookup_is_reported_as_not_loaded(server: HybridServer):
    server.back_up(PROMPT, slot=1)
    before = state_content(server.states, 4)
    name = get_storage_hash_str(PROMPT, None, page_size=PAGE)[-1]
    find = server.storage.batch_exists_v2

    def find_and_delete(*args: Any) -> Any:
        found = find(*args)
        server.delete(name, group=1)
        return found

    server.storage.batch_exists_v2 = find_and_delete
    assert server.prefetch(PROMPT, slot=4) == (6, 6, False)
    assert torch.equal(state_content(server.states, 4), before)
