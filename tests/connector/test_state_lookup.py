"""How far a store can supply a prompt of a model with recurrent states.

Every group must have its frames: one that is missing, of an older geometry or damaged ends the hit
before it, and nothing is served across a gap.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from bench_engine import T
from test_window_lookup import Asked, ask, query, store_of

from kvconnect.errors import ConfigurationError
from kvconnect.keys import Shard
from kvconnect.layout import KvCacheLayout, StateTensor
from kvconnect.shards import stored_heads

STATES = KvCacheLayout.of_states([StateTensor(1, "recurrent", (4,), torch.float32)], T)


def asked(num_tokens: int, *windows: int | None) -> Asked:
    """A prompt of a model with groups of these windows, and one of states."""
    made = query(num_tokens, windows)
    return replace(made, layouts=(*made.layouts, STATES))


def longest(made: Asked, present: set[tuple[int, int]]) -> int:
    """The rule: a state at the end, and everything that the other groups see from there."""
    state = len(made.windows) - 1
    ends = [0]
    for number in range(len(made.keys)):
        end = (number + 1) * T
        seen = all(
            (group, block) in present
            for group, window in enumerate(made.windows[:-1])
            for block in range(0 if window is None else max(0, end - window + 1) // T, number + 1)
        )
        if seen and (state, number) in present and end < len(made.tokens):
            ends.append(end)
    return max(ends)


@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(1000), marks=pytest.mark.slow)])
def test_a_prefix_with_a_missing_frame_is_a_miss(seeds: range) -> None:
    num_hits = 0
    for seed in seeds:
        chance = random.Random(seed)
        windows = chance.choice([(None,), (None, None), (None, 9), ()])
        made = asked(chance.randint(1, 90), *windows)
        blocks = range(len(made.keys))
        present = {(len(windows), number) for number in blocks if chance.random() < 0.3}
        for group in range(len(windows)):
            gone = {chance.choice(blocks)} if blocks and chance.random() < 0.6 else set()
            present |= {(group, number) for number in blocks if number not in gone}
        hit = ask(store_of(made, present), made, most_steps=chance.choice([0, 1, 1000]))
        best = longest(made, present)
        assert hit.end % T == 0
        assert hit.tail is None
        assert hit.end in (0, best) or hit.end < best
        served = {(group, number) for group, number in present if number * T < hit.end}
        assert hit.end == longest(replace(made, tokens=made.tokens[: hit.end + 1]), served)
        num_hits += hit.end > 0
    assert num_hits > len(seeds) // 4


def test_a_hit_ends_at_the_last_state() -> None:
    made = asked(200 * T + 3, None)
    present = {(0, number) for number in range(200)} | {(1, 31), (1, 63), (1, 150)}
    assert ask(store_of(made, present), made).end == 151 * T
    assert ask(store_of(made, present - {(1, 150)}), made).end == 64 * T
    assert ask(store_of(made, present - {(0, 40)}), made).end == 32 * T


def test_a_state_at_the_end_is_one_lookup() -> None:
    made = asked(20 * T + 3, None)
    store = store_of(made, {(0, number) for number in range(20)} | {(1, 19)})
    assert ask(store, made).end == 20 * T
    assert [len(keys) for keys in store.lookups] == [20, 1]


@pytest.mark.parametrize(
    ("present", "end"),
    [
        ({79, 1000, 4080, 4088}, 4089),
        ({79, 1000, 4080}, 4081),
        ({79, 1000, 3959, 3990}, 3960),  # 3990 is no multiple, and too far away
        ({79, 1000}, 80),
        ({1000}, 0),
        (set(), 0),
    ],
)
def test_far_behind_the_end_states_are_searched_at_multiples_of_the_interval(present, end) -> None:
    made = replace(asked(4096 * T + 3, None), state_interval=40 * T)
    there = {(0, number) for number in range(4096)} | {(1, number) for number in present}
    store = store_of(made, there)
    assert ask(store, made).end == end * T
    assert len(store.lookups) <= 1 + 1 + 32 + 4096 // 40
    assert max(len(keys) for keys in store.lookups[1:]) == 1


def test_the_last_block_of_a_prompt_is_not_used_in_part() -> None:
    made = asked(4 * T, None)
    present = {(group, number) for group in (0, 1) for number in range(4)}
    assert ask(store_of(made, present), made).end == 3 * T


def test_states_of_several_ranks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="tensor_parallel_size=2"):
        stored_heads([STATES], Shard(tp_rank=0, tp_size=2))
