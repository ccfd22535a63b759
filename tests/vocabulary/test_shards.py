"""Which heads a stored block holds, whatever the tensor parallelism of who saved it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey, Shard, store_key
from kvconnect.layout import KvCacheLayout, StateTensor
from kvconnect.shards import (
    RankShard,
    StoredHeads,
    dividing_rank,
    stored_heads,
    whole_layouts,
)

KEY = BlockKey(bytes(range(32)))
STATES = KvCacheLayout.of_states([StateTensor(1, "recurrent", (4,), torch.float32)], 16)
LATENT = KvCacheLayout(2, 1, 576, 0, 16, torch.bfloat16)


def layout(num_kv_heads: int) -> KvCacheLayout:
    return KvCacheLayout(2, num_kv_heads, 8, 8, 16, torch.float32)


def ranks(heads: int, tp_size: int, pp_size: int = 1) -> list[StoredHeads]:
    shards = [Shard(tp, tp_size, pp, pp_size) for pp in range(pp_size) for tp in range(tp_size)]
    own = layout(max(1, heads // tp_size))
    return [stored_heads([own], shard, [heads])[0] for shard in shards]


def test_one_rank_has_the_keys_that_it_always_had() -> None:
    [one] = ranks(8, 1)
    assert one.own == Shard()
    assert one.store_keys(KEY, 0, one.size) == (store_key(KEY),)
    assert one.is_first
    assert one.layout_of(one.size) == one.layout


def test_as_many_ranks_as_heads_have_a_key_each() -> None:
    for size in (2, 4, 8):
        assert [one.own for one in ranks(8, size)] == [Shard(rank, size) for rank in range(size)]
        assert all(one.is_first for one in ranks(8, size))


def test_more_ranks_than_heads_share_keys_and_the_first_of_them_saves() -> None:
    found = ranks(2, 8)
    assert [one.own for one in found] == [Shard(rank // 4, 2) for rank in range(8)]
    assert [one.is_first for one in found] == [True, False, False, False] * 2


@pytest.mark.parametrize(
    ("one", "heads"), [(STATES, [1]), (LATENT, None)], ids=["states", "latent"]
)
def test_what_every_rank_has_whole_is_stored_once(
    one: KvCacheLayout, heads: list[int] | None
) -> None:
    found = [stored_heads([one], Shard(rank, 4), heads)[0] for rank in range(4)]
    assert {each.own for each in found} == {Shard()}
    assert [each.is_first for each in found] == [True, False, False, False]
    assert found[0].sizes == (1,)
    assert whole_layouts([one], Shard(3, 4), heads) == (one,)


def test_that_ranks_have_all_states_or_parts_of_them_has_to_be_said() -> None:
    assert stored_heads([STATES], Shard())[0].own == Shard()
    with pytest.raises(ConfigurationError, match="num_kv_heads: missing"):
        stored_heads([STATES], Shard(0, 2))


def test_heads_that_every_rank_holds_are_stored_once() -> None:
    found = [stored_heads([layout(4)], Shard(rank, 2), [4])[0] for rank in range(2)]
    assert {one.own for one in found} == {Shard()}
    assert [one.is_first for one in found] == [True, False]
    [part] = found[1].slices(2)[1:]
    assert (part.shard, part.source, part.target) == (Shard(1, 2), slice(0, 2), slice(2, 4))


def test_ranks_that_hold_the_same_heads_do_not_divide_them() -> None:
    assert [dividing_rank([one]) for one in ranks(2, 4)] == [(rank, 4) for rank in range(4)]
    whole = stored_heads([layout(4), LATENT], Shard(1, 2), [4, 1])
    assert dividing_rank(whole) == (0, 1)
    assert dividing_rank([whole[0], ranks(4, 2)[1]]) == (1, 2)


def test_without_a_number_of_heads_none_are_on_several_ranks() -> None:
    [one] = stored_heads([layout(2)], Shard(3, 4))
    assert (one.num_kv_heads, one.own) == (8, Shard(3, 4))
    assert whole_layouts([layout(2)], Shard(3, 4)) == (layout(8),)


def test_pipeline_stages_have_keys_of_their_own() -> None:
    shards = ranks(4, 2, pp_size=2)[0].shards(2)
    assert shards == (Shard(0, 2, 0, 2), Shard(1, 2, 0, 2), Shard(0, 2, 1, 2), Shard(1, 2, 1, 2))
    [part] = ranks(4, 2, pp_size=2)[3].slices(1)
    assert part.shard == Shard(0, 1, 1, 2)


def rank_shards(heads: int, tp_size: int, pp_size: int = 1) -> list[RankShard]:
    return [RankShard.of(one.shard, (one,)) for one in ranks(heads, tp_size, pp_size)]


@pytest.mark.planted("rank-share", "engine", "key")
def test_ranks_keep_a_block_under_a_key_of_their_own_and_say_which_heads_it_has() -> None:
    found = rank_shards(8, 4)
    assert [one.heads() for one in found] == [range(n, n + 2) for n in (0, 2, 4, 6)]
    own = tuple(one.store_key(KEY) for one in found)
    assert own == tuple(store_key(KEY, 0, Shard(rank, 4)) for rank in range(4))
    assert len({KEY, *own}) == 5
    assert all(one.store_keys(KEY) == own for one in found)
    assert [(one.tp_rank, one.tp_size) for one in found] == [(rank, 4) for rank in range(4)]


def test_ranks_with_the_same_heads_share_a_key_and_the_first_saves() -> None:
    found = rank_shards(2, 4)
    assert [one.heads() for one in found] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [one.is_first() for one in found] == [True, False, True, False]
    keys = [one.store_key(KEY) for one in found]
    assert keys[0] == keys[1] != keys[2] == keys[3]
    assert found[0].store_keys(KEY) == (keys[0], keys[2])


def test_the_share_of_each_stage_and_group_has_its_key() -> None:
    stages = rank_shards(4, 2, pp_size=2)
    assert {one.store_keys(KEY) for one in stages} == {tuple(one.store_key(KEY) for one in stages)}
    [full, window] = (ranks(8, 2)[1], ranks(2, 2)[1])
    both = RankShard.of(full.shard, (full, window))
    assert both.store_key(KEY, 1) == store_key(KEY, 1, Shard(1, 2)) != both.store_key(KEY)
    assert (both.heads(0), both.heads(1)) == (range(4, 8), range(1, 2))


def test_its_own_size_is_looked_for_first_and_there_are_few_others() -> None:
    assert ranks(8, 1)[0].sizes == (1, 2, 4, 8)
    assert ranks(8, 4)[0].sizes == (4, 2, 8, 1)
    assert ranks(12, 3)[0].sizes[0] == 3
    for heads in range(1, 130):
        [one] = ranks(heads, 1)
        assert len(one.sizes) <= 8
        assert all(heads % size == 0 for size in one.sizes)


@given(st.data())
def test_slices_bring_every_head_of_a_rank_once_and_in_its_place(data: st.DataObject) -> None:
    heads = data.draw(st.integers(1, 24))
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    repeats = data.draw(st.sampled_from([1, 2, 4]))
    tp_size = data.draw(st.sampled_from(divisors))
    tp_size = heads * repeats if tp_size == heads else tp_size
    size = data.draw(st.sampled_from(divisors))
    for rank, one in enumerate(ranks(heads, tp_size)):
        numbers: list[int | None] = [None] * one.layout.num_kv_heads
        for part in one.slices(size):
            share = heads // size
            stored = list(range(part.shard.tp_rank * share, (part.shard.tp_rank + 1) * share))
            assert len(stored[part.source]) == len(numbers[part.target]) > 0
            assert set(numbers[part.target]) == {None}
            numbers[part.target] = stored[part.source]
        first = rank * heads // tp_size
        assert numbers == list(range(first, first + len(numbers)))
    assert len(one.slices(one.size)) == 1


@pytest.mark.parametrize(("heads", "tp_size"), [(6, 4), (2, 3), (0, 1)])
def test_heads_that_cannot_be_spread_evenly_are_refused(heads: int, tp_size: int) -> None:
    with pytest.raises(ConfigurationError, match="num_kv_heads"):
        StoredHeads(layout(1), Shard(0, tp_size), heads)


def test_a_layout_of_another_share_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="2 is a share of 8"):
        stored_heads([layout(4)], Shard(0, 4), [8])
    with pytest.raises(ConfigurationError, match="one number for each of the 1 pool groups"):
        stored_heads([layout(4)], Shard(), [4, 4])
