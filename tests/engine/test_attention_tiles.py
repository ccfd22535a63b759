"""A chunk behind cached tokens is attended to in tiles; the sum is that of one masked attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvconnect.engine.model import attention, scores
from kvconnect.engine.model.attention import Chunk, DecodeGroup, held_blocks
from kvconnect.engine.model.pages import LayerPages, SlotNumbers
from kvconnect.engine.model.scores import AttentionInput
from kvconnect.errors import UsageError
from kvconnect.layout import KvCacheLayout

SIZE, HEADS, KV_HEADS, DIM = 4, 4, 2, 8


SCORES = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([-1.0, 0.5, 2.0, 4.0], dtype=torch.float64)},
}
SCORES["both"] = SCORES["softcap"] | SCORES["sinks"]


def plain(query, key, value, start: int, window: int | None, softcap=None, sinks=None):
    """Softmax over what each query may see, written out."""
    groups = HEADS // KV_HEADS
    key, value = (one.repeat_interleave(groups, 0) for one in (key, value))
    places = torch.arange(key.shape[1])
    mine = torch.arange(start, start + query.shape[1])[:, None]
    seen = places <= mine
    if window is not None:
        seen &= places > mine - window
    scores = query @ key.transpose(1, 2)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    return (weights / total @ value).transpose(0, 1)


def filled(key, value, table, *, joined: bool) -> LayerPages:
    """Pages that hold keys and values of a sequence; what is in no slot of it is no number."""
    # Three layers in a block, of which this is the second; or keys and values apart.
    dims = key.shape[2], value.shape[2]
    pools = [torch.full((12, 3, SIZE, KV_HEADS, d), torch.nan, dtype=key.dtype) for d in dims]
    layout = KvCacheLayout(1, KV_HEADS, *dims, tokens_per_block=SIZE, dtype=key.dtype)
    buffers = torch.stack(pools, 2)[:, 1] if joined else (pools[0][:, 1], pools[1][:, 1])
    pages = LayerPages(buffers, layout)
    places, end = torch.arange(key.shape[1]), key.shape[1]
    slots = table[places // SIZE] * SIZE + places % SIZE
    numbers = SlotNumbers(slots.numpy(), torch.device("cpu"))
    pages.write(numbers, key.transpose(0, 1), value.transpose(0, 1))
    used = 1 + (end - 1) % SIZE
    pages.blank(table[-1:].expand(SIZE - used), torch.arange(used, SIZE))
    return pages


def states(seed: int, count: int, value_dim: int = DIM):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, value_dim))
    return [
        torch.randn(heads, count, dim, generator=generator, dtype=torch.float64)
        for heads, dim in sizes
    ]


@pytest.mark.parametrize("how", SCORES)
@pytest.mark.parametrize("window", [None, 3, 9, 30])
@pytest.mark.parametrize(("start", "count"), [(5, 11), (16, 5), (23, 1), (12, 17), (0, 14)])
@pytest.mark.parametrize("form", ["joined", "apart", "unequal"])
def test_tiles(monkeypatch, how, window, start, count, form):
    monkeypatch.setattr(attention, "_TILE", 5)
    monkeypatch.setattr(scores, "_MOST_SCORES", 300)
    end = start + count
    query, key, value = states(start, end, DIM - 2 if form == "unequal" else DIM)
    table = torch.randperm(12)[: -(-end // SIZE)]
    pages = filled(key, value, table, joined=form == "joined")
    new = slice(start, end)
    given = AttentionInput(
        query[None, :, new], key[None, :, new], value[None, :, new], 1.0, window, **SCORES[how]
    )
    chunk = Chunk(slice(0, count), slice(0, count), start, table.numpy(), SIZE, torch.device("cpu"))
    out = torch.empty(count, HEADS, value.shape[2], dtype=torch.float64)
    chunk.attend(given, pages, out)
    expected = plain(query[:, new], key, value, start, window, **SCORES[how])
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("how", SCORES)
@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("value_dim", [DIM, DIM - 2])
def test_single_tokens(how, window, value_dim):
    """Sequences of several lengths in one group, each with its own mask."""
    ends = (9, 14, 16)
    found, expected, keys, tables = [], [], [], []
    blocks = torch.randperm(12)
    for index, end in enumerate(ends):
        query, key, value = states(end, end, value_dim)
        tables.append(blocks[index * 4 : index * 4 + -(-end // SIZE)])
        keys.append((query, key, value))
        expected.append(plain(query[:, -1:], key, value, end - 1, window, **SCORES[how]))
    pages = filled(*keys[0][1:], tables[0], joined=False)
    for (_, key, value), table in zip(keys[1:], tables[1:], strict=True):
        other = filled(key, value, table, joined=False)
        pages.keys[table], pages.values[table] = other.keys[table], other.values[table]
    last = [torch.stack([one[part][:, -1] for one in keys], 1)[None] for part in range(3)]
    group = DecodeGroup(torch.arange(3), True, ends, [one.numpy() for one in tables], SIZE)
    found = group.attended(AttentionInput(*last, 1.0, window, **SCORES[how]), pages)
    torch.testing.assert_close(found, torch.cat(expected))


@pytest.mark.parametrize("table", [[1, -1], [1]])
def test_blocks_that_a_table_does_not_have_are_not_read(table):
    assert held_blocks(np.array([1, 2]), 0, 2).tolist() == [1, 2]
    with pytest.raises(UsageError, match="the cache manager does not hold them"):
        held_blocks(np.array(table), 0, 2)


def test_a_slot_is_written_by_one_token_of_a_step():
    with pytest.raises(UsageError, match=r"slots \[7\] .* gave a block to several requests"):
        SlotNumbers(np.array([3, 7, 7]), torch.device("cpu"))
