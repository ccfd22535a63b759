"""With windows, too: a store that is slow, damaged or lying costs time, nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from bench_engine import T
from stores import DictStore
from window_engine import (
    ALL_LAYOUTS,
    FULL_AND_WINDOW,
    PLAIN,
    WindowEngine,
    layout,
    llm_args,
    reference,
)
from window_runs import GENERATE, PROMPT, is_sound, keys_of, run

from kvconnect import frame
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.connector.io.orders import BlockLoad, LoadBlocks
from kvconnect.keys import BlockKey, store_key

ANSWER = reference(PROMPT, FULL_AND_WINDOW, GENERATE)


@pytest.fixture
def store() -> Iterator[DictStore]:
    """A store that has the prompt, in whole blocks."""
    store = DictStore(enumerable=False)
    run(store, FULL_AND_WINDOW)
    yield store
    store.open_doors()


def flipped(store: DictStore, key: bytes) -> None:
    def flip(asked: bytes, buffer: torch.Tensor) -> None:
        if asked == key:
            buffer[frame.HEADER_NBYTES + 11] ^= 4

    store.tamper = flip


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize("block", [0, 5, 8, 9])
def test_a_damaged_block_is_found_and_what_was_before_it_used(
    store: DictStore, group: int, block: int
) -> None:
    """The load fails as a whole; asked again, the store lacks just that block."""
    flipped(store, store_key(keys_of(PROMPT, FULL_AND_WINDOW)[block], group))
    used = group == 0 or block in blocks_needed(10, 10 * T, T)
    with WindowEngine(llm_args(store, FULL_AND_WINDOW), chunk=7) as bench:
        request = bench.submit(PROMPT, GENERATE)
        bench.run()
        assert request.tokens.view[len(PROMPT) :].tolist() == ANSWER
        assert bench.store_tokens[request.request_id] == (block * T if used else 10 * T)
        assert bench.kv.all_free()
    store.tamper = lambda *_: None
    assert is_sound(store, PROMPT, FULL_AND_WINDOW)
    assert run(store, FULL_AND_WINDOW) == (ANSWER, 10 * T)


def test_a_frame_of_one_group_under_the_key_of_another_is_a_miss(store: DictStore) -> None:
    """Also where both groups have blocks of one size."""
    twins = (layout(None, 0, 2), layout(10, 1, 3))
    for layouts in (FULL_AND_WINDOW, twins):
        store.frames.clear()
        run(store, layouts)
        for key in keys_of(PROMPT, layouts):
            ours, theirs = store_key(key, 0), store_key(key, 1)
            frames = store.frames[ours], store.frames[theirs]
            store.frames[theirs], store.frames[ours] = frames
        assert run(store, layouts) == (reference(PROMPT, layouts, GENERATE), 0)


def test_a_store_that_raises_on_load_is_asked_no_more_than_twice(store: DictStore) -> None:
    store.load_error = RuntimeError("broken pipe")
    lookups = len(store.lookups)
    assert run(store, FULL_AND_WINDOW) == (ANSWER, 0)
    assert len(store.lookups) - lookups <= 3 * 2


def test_a_store_that_claims_everything_is_found_out(store: DictStore) -> None:
    async def everything(keys):
        return len(keys)

    store.lookup = everything
    for layouts in (PLAIN, *ALL_LAYOUTS):
        store.frames.clear()
        answer = reference(PROMPT, layouts, GENERATE)
        assert run(store, layouts) == (answer, 0)


def test_what_is_computed_behind_a_load_is_saved() -> None:
    store = DictStore(enumerable=False)
    run(store, FULL_AND_WINDOW, PROMPT[: T + 1], 1)
    answer, loaded = run(store, FULL_AND_WINDOW)
    assert (answer, loaded) == (ANSWER, T)
    assert len(store.frames) == 2 * 11
    assert is_sound(store, PROMPT, FULL_AND_WINDOW)


def test_a_store_without_room_leaves_shorter_prompts_to_be_found() -> None:
    store = DictStore(enumerable=False)
    store.room = 9  # four blocks of both groups, and one
    assert run(store, FULL_AND_WINDOW) == (ANSWER, 0)
    assert is_sound(store, PROMPT, FULL_AND_WINDOW)
    assert run(store, FULL_AND_WINDOW) == (ANSWER, 4 * T)


def test_no_part_of_a_load_into_several_pools_is_valid() -> None:
    blocks = tuple(BlockLoad(BlockKey(bytes(32)), number, number=number) for number in range(4))
    order = LoadBlocks(1, T, 5 * T, blocks, divisible=False)
    assert [order.num_valid(count, T) for count in range(5)] == [T, T, T, T, 5 * T]
