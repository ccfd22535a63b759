"""What a fetch asks for as the other side computes, and when it is over."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.connector.disagg.decode import DecodeBook
from kvconnect.connector.disagg.fetch.pieces import FetchPlan, RemoteBlocks, cut_reads
from kvconnect.connector.disagg.messages import FetchOrder
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.keys import BlockKey, Shard
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest
from kvconnect.shards import HeadSlice
from kvconnect.transfer.control.messages import NOTHING_COMPUTED, Watermark

T = 16
LAYERS = 4
FULL = KvCacheLayout(2, 1, 4, 4, T, torch.float32, layers=(0, 2))
WINDOW = KvCacheLayout(2, 1, 4, 4, T, torch.float32, window=24, layers=(1, 3))


def bytes_of(reads):
    """Each byte that is read: from where, and to where."""
    return [
        (reads.remote_region, far + n, reads.local_region, near + n)
        for far, near in zip(reads.remote_offsets, reads.local_offsets, strict=True)
        for n in range(0, reads.nbytes, 64)
    ]


@settings(max_examples=50)
@given(st.integers(1, 90), st.integers(0, 5), st.lists(st.integers(1, 40), max_size=5), st.data())
def test_every_byte_is_read_once_and_never_before_it_is_computed(end, skipped, chunks, data):
    start = min(skipped, end // T) * T
    firsts, blocks, remote = [], [], []
    for group, layout in enumerate((FULL, WINDOW)):
        needed = blocks_needed(layout.window, end, T)
        first = max(start // T, needed.start)
        firsts.append(first)
        blocks.append([100 + n for n in range(first, needed.stop)])
        ids = tuple(200 + n for n in range(needed.start, needed.stop))
        remote.append(RemoteBlocks(10 + group, needed.start, ids, layout))
    order = FetchOrder(1, "name", "host:1", start, end, tuple(firsts), tuple(blocks))
    head = HeadSlice(Shard(), slice(0, 1), slice(0, 1))
    plan = FetchPlan(order, (FULL, WINDOW), (20, 21), {0: head, 1: head})
    known, seen, computed = NOTHING_COMPUTED, [], 0
    ends = sorted({min(end, sum(chunks[: n + 1])) for n in range(len(chunks))} | {end})
    for tokens in ends:
        for layers in range(1, LAYERS + 1):
            if data.draw(st.booleans()) and not (tokens == end and layers == LAYERS):
                continue  # a watermark may be lost: a later one says it, too
            known = Watermark(tokens=tokens, layers=layers).after(known)
            for reads in plan.take(known, remote):
                for part in cut_reads(reads, 1000):
                    seen += bytes_of(part)
                    for far in part.remote_offsets:
                        layout = FULL if part.remote_region == 10 else WINDOW
                        block, within = divmod(int(far), layout.block_nbytes)
                        last = (within + part.nbytes - 1) // layout.layer_nbytes
                        number = block - 200
                        whole = min(end, (number + 1) * T)
                        # Every layer of the piece holds all that the reader needs of the block.
                        now = layout.layers[last] < layers and tokens >= whole
                        assert now or computed >= whole
        computed = tokens
    assert plan.complete
    assert len(seen) == len(set(seen))
    total = sum(
        len(ids) * one.block_nbytes for ids, one in zip(blocks, (FULL, WINDOW), strict=True)
    )
    assert len(seen) * 64 == total


def test_a_watermark_of_a_later_chunk_says_that_the_one_before_is_whole():
    first = Watermark(tokens=16, layers=1)
    assert [first.tokens_of(layer) for layer in range(3)] == [16, 0, 0]
    then = Watermark(tokens=32, layers=1).after(first)
    assert [then.tokens_of(layer) for layer in range(3)] == [32, 16, 16]


def test_a_watermark_that_is_heard_first_says_what_was_computed_before():
    first = Watermark(tokens=48, layers=2, before=32).after(NOTHING_COMPUTED)
    assert [first.tokens_of(layer) for layer in range(3)] == [48, 48, 32]
    # One of the same chunk that says less of what was before takes nothing back.
    assert Watermark(tokens=48, layers=3).after(first).before == 32
    then = Watermark(tokens=64, layers=1, before=48).after(first)
    assert [then.tokens_of(layer) for layer in range(3)] == [64, 48, 48]


def test_watermarks_are_ordered_by_tokens_then_layers_then_what_was_before_then_kept():
    said = [(16, 3, 9, True), (32, 1, 0, False), (32, 2, 0, True), (32, 2, 5, False)]
    said = [*said, (32, 2, 5, True)]
    marks = [
        Watermark(tokens=tokens, layers=layers, before=before, kept=kept)
        for tokens, layers, before, kept in said
    ]
    assert all(one < two and not two < one for one, two in pairwise(marks))
    assert not marks[0] < marks[0]


def test_a_window_is_read_once_its_last_token_is_computed():
    """Before that the other side frees its first blocks, whatever it has told of them."""
    order = FetchOrder(1, "name", "host:1", 0, 40, (0,), ([5, 6, 7],))
    head = HeadSlice(Shard(), slice(0, 1), slice(0, 1))
    plan = FetchPlan(order, (WINDOW,), (20,), {0: head})
    remote = [RemoteBlocks(10, 0, (1, 2, 3), WINDOW)]
    computed = Watermark(tokens=39, layers=LAYERS).after(NOTHING_COMPUTED)
    assert plan.take(computed, remote) == []
    assert plan.take(Watermark(tokens=40, layers=LAYERS).after(computed), remote)
    assert plan.complete


@pytest.mark.parametrize("how", ["drop", "failed", "close"])
def test_claims_of_a_fetch_that_does_not_begin_are_dropped(how):
    """Or the other side keeps the blocks for them, as long as they are renewed."""
    dropped = []
    node = SimpleNamespace(
        layouts=(FULL,),
        config=SimpleNamespace(role="decode"),
        claim=lambda *_: [SimpleNamespace(drop=lambda: dropped.append(1), failed=False)],
    )
    book = DecodeBook(node, SimpleNamespace(model_digest=b"m" * 32, tokens_per_block=T))
    request = LlmRequest(
        1,
        np.arange(41, dtype=np.int32),
        chain_root=BlockKey(bytes(32)),
        tokens_per_block=T,
        kv_transfer_params={"transfer_id": "x", "address": "host:1"},
    )
    book.begin(request)
    assert not dropped
    getattr(book, how)(*(() if how == "close" else (request,)))
    assert dropped == [1]
    book.close()
    assert dropped == [1]
