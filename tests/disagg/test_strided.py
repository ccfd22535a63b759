"""Blocks of another shape: which bytes go where, against rows of a plain array."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.connector.disagg.fetch.sources import address_of_rank, sources
from kvconnect.connector.disagg.fetch.strided import BlockRun, strided_reads
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Shard
from kvconnect.layout import KvCacheLayout
from kvconnect.shards import StoredHeads
from kvconnect.transfer.reads import Reads

LAYERS = 3


def layout(heads: int, tokens_per_block: int, dims: tuple[int, int]) -> KvCacheLayout:
    return KvCacheLayout(LAYERS, heads, *dims, tokens_per_block, torch.int32)


def rows(pool: np.ndarray, one: KvCacheLayout, block: int) -> list[np.ndarray]:
    """Keys and values of a block, as views ``[num_layers, tokens, heads, dim]``."""
    dims = (one.key_dim, one.value_dim)
    parts, start = [], 0
    flat = pool[block].reshape(LAYERS, -1)
    for dim in dims[: 1 if not one.value_dim else 2]:
        length = one.tokens_per_block * one.num_kv_heads * dim
        part = flat[:, start : start + length]
        parts.append(part.reshape(LAYERS, one.tokens_per_block, one.num_kv_heads, dim))
        start += length
    return parts


def pool_of(one: KvCacheLayout, num_blocks: int) -> np.ndarray:
    return np.full((num_blocks, one.block_nbytes // 4), -1, np.int32)


def filled(one: KvCacheLayout, ids: list[int], first: int, heads: range, end: int) -> np.ndarray:
    """A pool that holds tokens up to `end`: each number says token, head, plane, layer and dim."""
    pool = pool_of(one, max(ids) + 1)
    for number, block in enumerate(ids):
        for plane, part in enumerate(rows(pool, one, block)):
            for at in range(one.tokens_per_block):
                token = (first + number) * one.tokens_per_block + at
                if token < end:
                    part[:, at] = expected(token, heads, plane, part.shape[-1])
    return pool


def expected(token: int, heads: range, plane: int, dim: int) -> np.ndarray:
    layers, numbers, dims = np.ogrid[:LAYERS, heads.start : heads.stop, :dim]
    return (((token * 16 + numbers) * 2 + plane) * 4 + layers) * 8 + dims


def copy(reads: list[Reads], remote: np.ndarray, local: np.ndarray) -> np.ndarray:
    """What a transport does; how often each byte was written."""
    far, near = remote.view(np.uint8).reshape(-1), local.view(np.uint8).reshape(-1)
    written = np.zeros(near.size, np.int64)
    for one in reads:
        for source, target in zip(one.remote_offsets, one.local_offsets, strict=True):
            near[target : target + one.nbytes] = far[source : source + one.nbytes]
            written[target : target + one.nbytes] += 1
    return written


@given(st.data())
def test_every_row_comes_from_its_place(data: st.DataObject) -> None:
    theirs, ours = (data.draw(st.sampled_from([2, 4, 8])) for _ in range(2))
    heads = data.draw(st.sampled_from([1, 2, 4, 6]))
    sizes = [n for n in (1, 2, 3, 4, 6, 8) if not heads % min(n, heads) and not n % min(n, heads)]
    their_size, our_size = (data.draw(st.sampled_from(sizes)) for _ in range(2))
    dims = data.draw(st.sampled_from([(3, 3), (3, 2), (4, 0)]))
    end = data.draw(st.integers(1, 40))
    start = data.draw(st.integers(0, (end - 1) // ours)) * ours
    begin = start - start % theirs if theirs > ours else start
    layers = range(*sorted((data.draw(st.integers(0, 2)), data.draw(st.integers(1, LAYERS)))))
    share = heads // min(our_size, heads)
    own = StoredHeads(
        layout(share, ours, dims), Shard(data.draw(st.integers(0, our_size - 1)), our_size), heads
    )
    near = list(np.random.default_rng(1).permutation(64)[: -(-end // ours) - start // ours])
    local = pool_of(own.layout, 64)
    written = np.zeros(local.nbytes, np.int64)
    their_share = heads // min(their_size, heads)
    for source in sources([own], their_size):
        part = source.heads[0]
        first = begin // theirs
        far = list(np.random.default_rng(2).permutation(64)[: -(-end // theirs) - first])
        one = layout(their_share, theirs, dims)
        held = range(part.shard.tp_rank * their_share, (part.shard.tp_rank + 1) * their_share)
        remote = filled(one, far, first, held, end)
        reads = strided_reads(
            BlockRun(7, one, part.source, first, far),
            BlockRun(9, own.layout, part.target, start // ours, near),
            tokens=range(start, end),
            layers=layers,
        )
        assert all((one.remote_region, one.local_region) == (7, 9) for one in reads)
        written += copy(reads, remote, local)
    assert written.max(initial=0) <= 1
    mine = range(own.own.tp_rank * share, (own.own.tp_rank + 1) * share)
    for number, block in enumerate(near):
        for plane, part in enumerate(rows(local, own.layout, block)):
            for at in range(ours):
                token = start + number * ours + at
                for layer in range(LAYERS):
                    right = expected(token, mine, plane, part.shape[-1])[layer]
                    if layer not in layers:
                        assert (part[layer, at] == -1).all()
                    elif token < end:
                        assert (part[layer, at] == right).all()


def test_pieces_are_as_long_as_the_smaller_block_where_heads_are_the_same() -> None:
    small, large = layout(2, 16, (4, 4)), layout(2, 64, (4, 4))
    whole = slice(0, 2)
    far, near = BlockRun(0, small, whole, 0, range(8)), BlockRun(0, large, whole, 0, (1, 0))
    [reads] = strided_reads(far, near, tokens=range(128), layers=range(LAYERS))
    assert reads.nbytes == 16 * 2 * 4 * 4
    assert len(reads.local_offsets) == 8 * LAYERS * 2


def test_every_rank_of_this_engine_is_counted_as_a_reader() -> None:
    def readers(heads: int, theirs: int, ours: int) -> list[list[tuple[int, int]]]:
        own = layout(max(1, heads // ours), 16, (4, 4))
        ranks = [StoredHeads(own, Shard(rank, ours), heads) for rank in range(ours)]
        return [[(one.rank, one.readers) for one in sources([r], theirs)] for r in ranks]

    assert readers(4, 1, 2) == [[(0, 2)], [(0, 2)]]
    assert readers(4, 2, 1) == [[(0, 1), (1, 1)]]
    assert readers(2, 4, 1) == [[(0, 1), (2, 1)]]
    assert readers(2, 4, 4) == [[(0, 2)], [(0, 2)], [(2, 2)], [(2, 2)]]
    with pytest.raises(ConfigurationError, match="tp_size"):
        readers(2, 3, 1)


def test_ranks_listen_one_port_after_the_other() -> None:
    assert address_of_rank("host:7000", 0) == "host:7000"
    assert address_of_rank("[::1]:7000", 3) == "[::1]:7003"
    with pytest.raises(ConfigurationError, match="no port for rank 8"):
        address_of_rank("host:65530", 8)
