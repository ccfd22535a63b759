"""Tensor-parallel ranks of the built-in pair, with pools and without a model.

The KV of a token is drawn from what it and the tokens before it are, for all heads of the model; a
rank's pool holds its heads of that. So whatever a load leaves wrong differs from what is expected.
"""

from __future__ import annotations

import itertools
import pickle
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.data import KvCachePool, LlmArgs, RequestData, SchedulerOutput
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.connector.pair.scheduler import OffloadScheduler
from kvconnect.connector.pair.worker import OffloadWorker
from kvconnect.connector.stream import CpuStream
from kvconnect.explain.outcome import Outcome
from kvconnect.keys import Namespace, Shard, root_key
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest
from kvconnect.shards import StoredHeads, whole_layouts

DIGEST = b"d" * 32
T = 4
NUM_BLOCKS = 12
STREAM = CpuStream()


def layout(heads: int, **fields: Any) -> KvCacheLayout:
    return KvCacheLayout(3, heads, 2, 2, T, torch.float64, **fields)


LATENT = KvCacheLayout(3, 1, 5, 0, T, torch.float64)
UNEQUAL = KvCacheLayout(2, 4, 3, 2, T, torch.float64)
"""Keys and values of different width."""


def heads_of(pool: Tensor, whole: KvCacheLayout, low: int, high: int) -> Tensor:
    """The heads ``low..high`` of the flat pool `pool` of layout `whole`."""
    blocks, layers, heads = len(pool), whole.num_layers, whole.num_kv_heads
    size = whole.tokens_per_block
    if whole.kv_factor == 2:
        planes = pool.view(blocks, layers, 2, size, heads, whole.key_dim)
        return planes[..., low:high, :].reshape(blocks, layers, 2, -1)
    cut = size * heads * whole.key_dim
    keys = pool[:, :, 0, :cut].view(blocks, layers, size, heads, -1)[..., low:high, :]
    parts = [keys.flatten(2)]
    if whole.value_dim:
        values = pool[:, :, 0, cut:].view(blocks, layers, size, heads, -1)[..., low:high, :]
        parts.append(values.flatten(2))
    return torch.cat(parts, -1).unsqueeze(2)


def kv_of(tokens: np.ndarray, whole: KvCacheLayout, group: int) -> Tensor:
    """The KV of a prompt, as blocks of a flat pool; what its last block does not hold is 0."""
    size = whole.tokens_per_block
    count = -(-len(tokens) // size)
    blocks = torch.zeros(whole.flat_shape(count), dtype=whole.dtype)
    dims = [whole.key_dim] * 2 if whole.kv_factor == 2 else [whole.key_dim, whole.value_dim]
    shape = (whole.num_layers, whole.num_kv_heads)
    state = group
    for position, token in enumerate(tokens):
        state = zlib.crc32(token.tobytes(), state)
        random = np.random.default_rng(state)
        values = [torch.from_numpy(random.random((*shape, dim))) for dim in dims]
        block, at = divmod(position, size)
        if whole.kv_factor == 2:
            planes = blocks[block].view(whole.num_layers, 2, size, whole.num_kv_heads, -1)
            planes[:, 0, at], planes[:, 1, at] = values
            continue
        cut = size * whole.num_kv_heads * whole.key_dim
        rows = blocks[block, :, 0, :cut].view(whole.num_layers, size, whole.num_kv_heads, -1)
        rows[:, at] = values[0]
        if whole.value_dim:
            rows = blocks[block, :, 0, cut:].view(whole.num_layers, size, whole.num_kv_heads, -1)
            rows[:, at] = values[1]
    return blocks


class Ranks:
    """`tp_size` ranks of a model whose pool groups have `wholes` as layouts."""

    _ids = itertools.count()

    def __init__(
        self, config: KvCacheConnectorConfig, wholes: Sequence[KvCacheLayout], tp_size: int
    ) -> None:
        self.wholes = tuple(wholes)
        self.size = wholes[0].tokens_per_block
        self.heads: list[tuple[StoredHeads, ...]] = []
        self.pools: list[list[Tensor]] = []
        self.workers: list[OffloadWorker] = []
        self.losses: list[Outcome] = []  # the reasons of loads that failed
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
            self.heads.append(args.stored_heads)

    def _args(self, config: KvCacheConnectorConfig, shard: Shard) -> LlmArgs:
        heads = tuple(one.num_kv_heads for one in self.wholes)
        own = tuple(
            replace(one, num_kv_heads=max(1, one.num_kv_heads // shard.tp_size))
            for one in self.wholes
        )
        assert whole_layouts(own, shard, heads) == self.wholes
        cache = KvCacheConfig(tokens_per_block=self.size)
        return LlmArgs("model", cache, config, own, DIGEST, shard, num_kv_heads=heads)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in self.workers:
            worker.shutdown()
        self.scheduler.shutdown()

    def request(self, prompt: Sequence[int], params: dict[str, Any] | None = None) -> LlmRequest:
        return LlmRequest(
            next(self._ids),
            np.array(prompt, np.int32),
            chain_root=root_key(DIGEST, self.wholes, Namespace()),
            tokens_per_block=self.size,
            kv_transfer_params=params,
        )

    def begin(
        self, prompt: Sequence[int], params: dict[str, Any] | None, ids: Sequence[int]
    ) -> tuple[LlmRequest, int]:
        """A new request that holds the blocks `ids`; how many tokens are to be loaded."""
        request = self.request(prompt, params)
        self.scheduler.on_new_request(request)
        num_tokens, in_background = self.scheduler.get_num_new_matched_tokens(request, 0)
        assert in_background is (num_tokens > 0)
        request.num_connector_matched_tokens = num_tokens
        self.scheduler.update_state_after_alloc(request, list(ids))
        if num_tokens:
            output = SchedulerOutput(loading_requests=[self._data(request, ids, 0, 0)])
            self._bind(self.scheduler.build_connector_meta(output))
        return request, num_tokens

    def run(self, prompt: Sequence[int]) -> int:
        """Load what the store has, compute the rest, save it; how many tokens were loaded."""
        for pools in self.pools:
            for pool in pools:
                pool.fill_(torch.nan)
        ids = list(range(1, 1 + -(-len(prompt) // T)))
        request, num_tokens = self.begin(prompt, None, ids)
        if num_tokens:
            num_tokens = self._wait_loaded(request, num_tokens)
        for rank in range(len(self.workers)):
            self.check(prompt, ids, num_tokens, rank)
        self.compute(request, ids, num_tokens)
        self._end(request, ids)
        return num_tokens

    def compute(self, request: LlmRequest, ids: Sequence[int], num_loaded: int = 0) -> None:
        """Computes what was not loaded; everything of the request is in the pools then."""
        prompt = request.tokens.view
        data = self._data(request, ids, num_loaded, len(prompt) - num_loaded)
        self._bind(self.scheduler.build_connector_meta(SchedulerOutput([data])))
        for rank, worker in enumerate(self.workers):
            for group, pool in enumerate(self.pools[rank]):
                pool[list(ids)] = self._expected(prompt, rank, group)
            for layer in range(max(one.num_layers for one in self.wholes)):
                worker.save_kv_layer(layer, STREAM)
            worker.wait_for_save(STREAM)
            worker.clear_connector_meta()
        request.num_computed_tokens = request.num_tokens

    def _data(
        self, request: LlmRequest, ids: Sequence[int], computed: int, scheduled: int
    ) -> RequestData:
        return RequestData(
            request.request_id,
            request.get_tokens(0),
            list(ids),
            computed,
            scheduled,
            list(request.block_keys()),
            tuple([*ids] for _ in self.wholes),
            priorities=[35] * len(ids),
        )

    def _bind(self, meta: object) -> None:
        for worker in self.workers:
            worker.bind_connector_meta(pickle.loads(pickle.dumps(meta)))
            worker.start_load_kv(STREAM)

    def _wait_loaded(self, request: LlmRequest, num_tokens: int) -> int:
        """How many tokens every rank has."""
        pending = list(self.workers)
        deadline = time.monotonic() + 60
        valid = num_tokens
        while pending:
            assert time.monotonic() < deadline, "a load does not end"
            for worker in list(pending):
                _, loaded = worker.get_finished([], [])
                failed = worker.get_failed()
                if loaded or failed:
                    pending.remove(worker)
                valid = min([valid, *(one.num_valid_tokens for one in failed)])
                self.losses += [one.loss for one in failed]
            time.sleep(0.0005)
        if valid < num_tokens:
            self.scheduler.load_failed(request, valid)
        return valid

    def _end(self, request: LlmRequest, ids: list[int]) -> None:
        if self.scheduler.request_finished(request, ids):
            self._bind(self.scheduler.build_idle_meta())
            for worker in self.workers:
                assert worker.get_finished([request.request_id], [])[0] == [request.request_id]
        for worker in self.workers:
            assert worker._queue.flush(60)
            meta = worker.build_worker_meta()
            assert meta is None or not meta.missing

    # ------------------------------------------------------------------ what the pools hold

    def _expected(self, prompt: Sequence[int], rank: int, group: int) -> Tensor:
        whole, tp_size = self.wholes[group], len(self.workers)
        share = max(1, whole.num_kv_heads // tp_size)
        low = rank * whole.num_kv_heads // tp_size
        return heads_of(kv_of(np.array(prompt, np.int32), whole, group), whole, low, low + share)

    def check(self, prompt: Sequence[int], ids: Sequence[int], num_tokens: int, rank: int) -> None:
        """The pools of `rank` hold what blocks of `num_tokens` loaded tokens have to."""
        for group, pool in enumerate(self.pools[rank]):
            one = self.heads[rank][group].layout
            expected = self._expected(prompt, rank, group)
            for number in blocks_needed(one.window, num_tokens, self.size):
                valid = min(self.size, num_tokens - number * self.size)
                found = pool[ids[number]], expected[number]
                rows = zip(*(rows_of(block, one, valid) for block in found), strict=True)
                assert all(torch.equal(got, right) for got, right in rows), (rank, group, number)


def on_store(
    store: Backend | str, wholes: Sequence[KvCacheLayout], tp_size: int, **settings: Any
) -> Ranks:
    """Ranks that share `store`."""
    where = {"url": store} if isinstance(store, str) else {"backend": store}
    settings = {"lookup_timeout_ms": 60_000, **settings}
    return Ranks(KvCacheConnectorConfig(**where, **settings), wholes, tp_size)


def rows_of(block: Tensor, one: KvCacheLayout, valid: int) -> list[Tensor]:
    """Keys and values of the first `valid` tokens of a block of a flat pool."""
    if one.kv_factor == 2:
        return [block.view(one.num_layers, 2, one.tokens_per_block, -1)[:, :, :valid]]
    cut = one.tokens_per_block * one.num_kv_heads * one.key_dim
    parts = [block[:, 0, :cut], block[:, 0, cut:]]
    return [
        part.reshape(one.num_layers, one.tokens_per_block, -1)[:, :valid]
        for part in parts
        if part.shape[1]
    ]
