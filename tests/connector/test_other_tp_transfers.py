"""Engines of different numbers of ranks fetch prompts from each other: pools without a model."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from free_ports import free_ports
from tp_ranks import DIGEST, LATENT, STREAM, UNEQUAL, T, heads_of, kv_of, layout, rows_of

from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import KvCachePool, LlmArgs, RequestData, SchedulerOutput
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.connector.offload import OffloadScheduler, OffloadWorker
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Namespace, Shard, root_key
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest
from kvconnect.shards import whole_layouts

PROMPT = list(range(1, 5 * T + 4))
NUM_BLOCKS = 12


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.001)


class Engine:
    """The transfer pair on `tp_size` ranks."""

    _ids = itertools.count()

    def __init__(
        self, role: str, wholes: Sequence[KvCacheLayout], tp_size: int, **transfer: Any
    ) -> None:
        self.wholes = wholes
        self.size = wholes[0].tokens_per_block
        listen = f"127.0.0.1:{free_ports(tp_size)}"
        transfer = {"role": role, "listen": listen, "lease_s": 30.0} | transfer
        config = KvCacheConnectorConfig(transfer=transfer, load_timeout_s=60, save_timeout_s=60)
        self.workers: list[OffloadWorker] = []
        self.pools: list[list[torch.Tensor]] = []
        self.layouts: list[tuple[KvCacheLayout, ...]] = []
        for rank in range(tp_size):
            args = self._args(config, Shard(rank, tp_size))
            if rank == 0:
                self.scheduler = OffloadScheduler(args)
            worker = OffloadWorker(args)
            pools = [
                torch.full(one.flat_shape(NUM_BLOCKS), torch.nan, dtype=one.dtype)
                for one in args.layouts
            ]
            pairs = zip(args.layouts, pools, strict=True)
            worker.register_kv_cache_layout([KvCachePool(one, pool) for one, pool in pairs])
            self.workers.append(worker)
            self.pools.append(pools)
            self.layouts.append(args.layouts)

    def _args(self, config: KvCacheConnectorConfig, shard: Shard) -> LlmArgs:
        heads = tuple(one.num_kv_heads for one in self.wholes)
        own = tuple(
            replace(one, num_kv_heads=max(1, one.num_kv_heads // shard.tp_size))
            for one in self.wholes
        )
        assert whole_layouts(own, shard, heads) == tuple(self.wholes)
        cache = KvCacheConfig(tokens_per_block=self.size)
        return LlmArgs("model", cache, config, own, DIGEST, shard, num_kv_heads=heads)

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()

    def request(self, prompt: Sequence[int], params: dict[str, Any]) -> LlmRequest:
        root = root_key(DIGEST, self.wholes, Namespace())
        tokens = np.array(prompt, np.int32)
        return LlmRequest(
            next(self._ids),
            tokens,
            chain_root=root,
            tokens_per_block=self.size,
            kv_transfer_params=params,
        )

    def _data(self, request: LlmRequest, ids: list[int], scheduled: int) -> RequestData:
        return RequestData(
            request.request_id,
            request.get_tokens(0),
            ids,
            0,
            scheduled,
            list(request.block_keys()),
            tuple([*ids] for _ in self.wholes),
            priorities=[35] * len(ids),
        )

    def _bind(self, meta: object) -> None:
        for worker in self.workers:
            worker.bind_connector_meta(pickle.loads(pickle.dumps(meta)))
            worker.start_load_kv(STREAM)

    def expected(self, prompt: Sequence[int], rank: int, group: int) -> torch.Tensor:
        whole = self.wholes[group]
        low = rank * whole.num_kv_heads // len(self.workers)
        high = low + self.layouts[rank][group].num_kv_heads
        return heads_of(kv_of(np.array(prompt, np.int32), whole, group), whole, low, high)

    def prefill(self, prompt: Sequence[int], transfer_id: str) -> tuple[LlmRequest, dict[str, Any]]:
        """Compute `prompt` and hand it out."""
        request = self.request(prompt, {"do": "prefill", "transfer_id": transfer_id})
        self.scheduler.on_new_request(request)
        assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
        ids = [3 + n for n in range(-(-len(prompt) // self.size))]
        self.scheduler.update_state_after_alloc(request, ids)
        data = self._data(request, ids, len(prompt))
        self._bind(self.scheduler.build_connector_meta(SchedulerOutput([data])))
        for rank, worker in enumerate(self.workers):
            for group, pool in enumerate(self.pools[rank]):
                pool[ids] = self.expected(prompt, rank, group)
            for layer in range(max(one.num_layers for one in self.wholes)):
                worker.save_kv_layer(layer, STREAM)
            worker.wait_for_save(STREAM)
            worker.clear_connector_meta()
        request.num_computed_tokens = len(prompt)
        request.is_finished = request.is_finished_normal = True
        assert self.scheduler.request_finished(request, ids)
        self._bind(self.scheduler.build_idle_meta())
        params = self.scheduler.get_kv_transfer_params(request)
        assert params is not None
        return request, params

    def fetch(self, prompt: Sequence[int], params: dict[str, Any]) -> list[str]:
        """Fetch `prompt` and compare all pools; why not, on each rank that has failed."""
        request = self.request(prompt, params)
        self.scheduler.on_new_request(request)
        num_tokens, in_background = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert (num_tokens, in_background) == (len(prompt) - 1, True)
        request.num_connector_matched_tokens = num_tokens
        ids = [9 - n for n in range(-(-len(prompt) // self.size))]
        self.scheduler.update_state_after_alloc(request, ids)
        output = SchedulerOutput(loading_requests=[self._data(request, ids, 0)])
        self._bind(self.scheduler.build_connector_meta(output))
        loaded: set[int] = set()
        failed: dict[int, str] = {}

        def over() -> bool:
            for rank, worker in enumerate(self.workers):
                if worker.get_finished([], [])[1]:
                    loaded.add(rank)
                for failure in worker.get_failed():
                    failed[rank] = failure.reason
            return loaded | failed.keys() == set(range(len(self.workers)))

        until(over)
        for rank in loaded - failed.keys():
            self._check(prompt, ids, num_tokens, rank)
        return [failed[rank] for rank in sorted(failed)]

    def _check(self, prompt: Sequence[int], ids: list[int], num_tokens: int, rank: int) -> None:
        for group, (own, pool) in enumerate(zip(self.layouts[rank], self.pools[rank], strict=True)):
            right = self.expected(prompt, rank, group)
            for number in blocks_needed(own.window, num_tokens, self.size):
                valid = min(self.size, num_tokens - number * self.size)
                pairs = zip(
                    rows_of(pool[ids[number]], own, valid),
                    rows_of(right[number], own, valid),
                    strict=True,
                )
                assert all(torch.equal(got, wanted) for got, wanted in pairs), (rank, number)

    def lets_go(self, request: LlmRequest) -> None:
        """Every rank gives the blocks of `request` back."""
        pending = set(self.workers)

        def over() -> bool:
            for worker in list(pending):
                if request.request_id in worker.get_finished([], [])[0]:
                    pending.discard(worker)
            return not pending

        until(over)

    def is_unread(self) -> bool:
        """Whether no lease is held: one that ends holds its memory, and a thread, until then."""
        nodes = [worker._node for worker in self.workers]
        return all(node is None or node.offers.server.table.last_end() is None for node in nodes)


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(*args: Any, **transfer: Any) -> Engine:
        made.append(Engine(*args, **transfer))
        return made[-1]

    yield make
    for one in made:
        one.close()


MODELS = {
    "many heads": (layout(4),),
    "fewer heads than ranks": (layout(2),),
    "latent": (LATENT,),
    "keys wider than values": (UNEQUAL,),
    "a window, and fewer heads in it": (layout(4), layout(2, window=14)),
}


def resized(wholes: Sequence[KvCacheLayout], size: int) -> tuple[KvCacheLayout, ...]:
    return tuple(replace(one, tokens_per_block=size) for one in wholes)


@pytest.mark.planted("rank-share", "transfer", "equal")
@pytest.mark.planted("other-rank-count", "transfer", "equal")
@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1), (4, 2), (2, 4)])
@pytest.mark.parametrize("wholes", MODELS.values(), ids=MODELS)
def test_every_rank_gets_its_heads(
    engine: Callable[..., Engine],
    wholes: tuple[KvCacheLayout, ...],
    theirs: int,
    ours: int,
) -> None:
    sizes = [T, 2 * T]
    prefill = engine("prefill", resized(wholes, sizes[theirs > ours]), theirs)
    decode = engine("decode", resized(wholes, sizes[theirs < ours]), ours)
    request, params = prefill.prefill(PROMPT, "one")
    assert decode.fetch(PROMPT, params) == []
    prefill.lets_go(request)  # long before leases end: each is released by all of its readers


@pytest.mark.parametrize(("theirs", "ours"), [(1, 2), (2, 1)])
def test_the_same_over_nixl(engine: Callable[..., Engine], theirs: int, ours: int) -> None:
    wholes = (layout(4), layout(2, window=14))
    prefill = engine("prefill", wholes, theirs, transport="nixl")
    decode = engine("decode", resized(wholes, 2 * T), ours, transport="nixl")
    request, params = prefill.prefill(PROMPT, "one")
    assert decode.fetch(PROMPT, params) == []
    prefill.lets_go(request)


def test_a_rank_that_is_gone_fails_the_load_of_those_that_need_it(
    engine: Callable[..., Engine],
) -> None:
    prefill = engine("prefill", (layout(4),), 2)
    decode = engine("decode", (layout(4),), 1)
    _, params = prefill.prefill(PROMPT, "one")
    prefill.workers[1].shutdown()
    [reason] = decode.fetch(PROMPT, params)
    assert "cannot be reached" in reason
    node = decode.workers[0]._node
    assert node.fetcher is not None
    until(lambda: not (node.fetcher._fetches or node.fetcher.claims))
    until(prefill.is_unread)


def test_another_number_of_ranks_than_it_has_is_refused(engine: Callable[..., Engine]) -> None:
    prefill = engine("prefill", (layout(4),), 2)
    decode = engine("decode", (layout(4),), 1)
    _, params = prefill.prefill(PROMPT, "one")
    [reason] = decode.fetch(PROMPT, params | {"tp_size": 1})
    assert "it is rank 0 of 2, not 0 of 1" in reason
    until(prefill.is_unread)
    with pytest.raises(ConfigurationError, match="tp_size"):
        decode.fetch(PROMPT, params | {"tp_size": 3})
    with pytest.raises(ConfigurationError, match="1 to 1024"):
        decode.fetch(PROMPT, params | {"tp_size": 4096})


def test_several_ranks_need_a_port_to_count_from(engine: Callable[..., Engine]) -> None:
    with pytest.raises(ConfigurationError, match="give the first one"):
        engine("prefill", (layout(4),), 2, listen="127.0.0.1:0")
    engine("decode", (layout(4),), 2, listen="127.0.0.1:0")
