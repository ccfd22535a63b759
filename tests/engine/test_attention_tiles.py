"""A chunk behind cached tokens is attended to in tiles; the sum is that of one masked attention."""

from __future__ import annotations

import pytest
import torch

from kvconnect.engine.model import attention
from kvconnect.engine.model.attention import AttentionInput, Chunk
from kvconnect.engine.model.pages import LayerPages, SlotNumbers
from kvconnect.layout import KvCacheLayout

SIZE, HEADS, KV_HEADS, DIM = 4, 4, 2, 8


def plain(query, key, value, start: int, window: int | None):
    """Softmax over what each query may see, written out."""
    groups = HEADS // KV_HEADS
    key, value = (one.repeat_interleave(groups, 0) for one in (key, value))
    places = torch.arange(key.shape[1])
    mine = torch.arange(start, start + query.shape[1])[:, None]
    seen = places <= mine
    if window is not None:
        seen &= places > mine - window
    scores = (query @ key.transpose(1, 2)).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ value).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 3, 9, 30])
@pytest.mark.parametrize(("start", "count"), [(5, 11), (16, 5), (23, 1), (12, 17)])
@pytest.mark.parametrize("joined", [True, False])
def test_tiles(monkeypatch, window, start, count, joined):
    monkeypatch.setattr(attention, "_TILE", 5)
    generator = torch.Generator().manual_seed(start)
    end = start + count
    query, key, value = (
        torch.randn(heads, end, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    table = torch.randperm(12, generator=generator)[: -(-end // SIZE)]
    # Three layers in a block, of which this is the second; or keys and values apart.
    shape = (12, 3, 2, SIZE, KV_HEADS, DIM)
    pool = torch.full(shape, torch.nan, dtype=torch.float64)[:, 1]
    layout = KvCacheLayout(1, KV_HEADS, DIM, DIM, tokens_per_block=SIZE, dtype=torch.float64)
    pages = LayerPages(pool if joined else (pool[:, 0], pool[:, 1]), layout)
    places = torch.arange(end)
    slots = table[places // SIZE] * SIZE + places % SIZE
    numbers = SlotNumbers(slots.numpy(), torch.device("cpu"))
    pages.write(numbers, key.transpose(0, 1), value.transpose(0, 1))
    pages.blank(
        table[-1:].expand(SIZE - 1 - (end - 1) % SIZE), torch.arange(1 + (end - 1) % SIZE, SIZE)
    )
    new = slice(start, end)
    given = AttentionInput(query[None, :, new], key[None, :, new], value[None, :, new], 1.0, window)
    chunk = Chunk(slice(0, count), slice(0, count), start, table.numpy(), SIZE, torch.device("cpu"))
    out = torch.empty(count, HEADS, DIM, dtype=torch.float64)
    chunk.attend(given, pages, out)
    torch.testing.assert_close(out, plain(query[:, new], key, value, start, window))
