"""The built-in pair, also with windows: what is needed comes back, and nothing else is moved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench_engine import T
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import DictStore
from window_engine import (
    ALL_LAYOUTS,
    FULL_AND_WINDOW,
    GARBAGE,
    PLAIN,
    TWO_WINDOWS,
    GroupKv,
    Layouts,
    WindowEngine,
    layout,
    llm_args,
    plain_run,
    reference,
)
from window_runs import GENERATE, PROMPT, is_sound, keys_of, run

from kvconnect import frame
from kvconnect.backends.memory.store import MemoryBackend
from kvconnect.connector.data import RequestData
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.connector.io.orders import LoadBlocks
from kvconnect.connector.pair.finding import StoreFinding
from kvconnect.keys import Namespace, chain_key, root_key, store_key
from kvconnect.request import LlmRequest


@pytest.fixture(
    params=[PLAIN, *ALL_LAYOUTS],
    ids=["plain", "mixed", "two-windows", "window-only", "two-shapes"],
)
def layouts(request: pytest.FixtureRequest) -> Layouts:
    return request.param


def test_all_but_the_last_prompt_token_come_back_after_a_restart(
    store: DictStore, layouts: Layouts
) -> None:
    answer = reference(PROMPT, layouts, GENERATE)
    assert run(store, layouts) == (answer, 0)
    assert is_sound(store, PROMPT, layouts)
    assert run(store, layouts) == (answer, len(PROMPT) - 1)
    assert not store.is_open


@pytest.mark.parametrize("chunk", [1, 3, T, 2 * T + 1])
def test_every_block_is_saved_though_windows_pass_over_it(
    store: DictStore, layouts: Layouts, chunk: int
) -> None:
    """Each in the step that fills it: given up afterwards, it is overwritten at once."""
    answer = reference(PROMPT, layouts, GENERATE)
    assert run(store, layouts, chunk=chunk, save_partial_tails=False) == (answer, 0)
    assert len(store.frames) == 11 * len(layouts)
    assert is_sound(store, PROMPT + answer, layouts)
    # Shorter prompts find what their windows need, at whatever length they leave the path.
    store.capabilities = replace(store.capabilities, enumerable=False)
    for length in (2 * T, 5 * T, 7 * T + 1):
        branch = PROMPT[:length] + [88] * 7
        answer = reference(branch, layouts)
        assert run(store, layouts, branch, 1, chunk) == (answer, length - length % T)


def test_loads_bring_what_the_windows_need_and_nothing_else(
    store: DictStore, layouts: Layouts
) -> None:
    run(store, layouts, save_partial_tails=False)
    store.capabilities = replace(store.capabilities, enumerable=False)
    store.loads.clear()
    assert run(store, layouts)[1] == 10 * T
    keys = keys_of(PROMPT, layouts)
    wanted = {
        store_key(keys[number], group)
        for group, one in enumerate(layouts)
        for number in blocks_needed(one.window, 10 * T, T)
    }
    loaded = [key for call in store.loads for key in call]
    assert len(loaded) == len(wanted)
    assert set(loaded) == wanted


def test_a_part_of_a_load_counts_in_one_pool_without_a_window_only(
    store: DictStore, layouts: Layouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(store, layouts)
    loads: list[LoadBlocks | None] = []
    order = StoreFinding.order

    def watched(finding: StoreFinding, data: RequestData) -> LoadBlocks | None:
        loads.append(order(finding, data))
        return loads[-1]

    monkeypatch.setattr(StoreFinding, "order", watched)
    run(store, layouts)
    (load,) = filter(None, loads)
    count = len(load.blocks)
    parts = [number * T for number in range(count)] if layouts is PLAIN else [0] * count
    assert [load.num_valid(number, T) for number in range(count)] == parts
    assert load.num_valid(count, T) == len(PROMPT) - 1


def test_a_device_match_is_not_loaded_again(store: DictStore, layouts: Layouts) -> None:
    answer = reference(PROMPT, layouts, GENERATE)
    run(store, layouts, save_partial_tails=False)
    store.capabilities = replace(store.capabilities, enumerable=False)
    store.loads.clear()
    request, sound = plain_run(PROMPT, layouts)
    kv = GroupKv(layouts)
    kv.device_match = lambda _: 9 * T

    def fill(admitted: LlmRequest) -> None:
        for group in range(len(layouts)):
            held = kv.held[admitted.request_id][group]
            for number in range(9):
                if held[number] >= 0:
                    right = sound.held[request.request_id][group][number]
                    kv.pools[group][held[number]] = sound.pools[group][right]

    kv.fill = fill
    with WindowEngine(llm_args(store, layouts), kv=kv) as bench:
        assert bench.answer(PROMPT, GENERATE) == answer
    assert sum(len(call) for call in store.loads) == len(layouts)  # block 9 of each group


def test_a_load_begins_where_the_device_match_really_ends(
    store: DictStore, layouts: Layouts
) -> None:
    """A cache manager may claim less than it foretold: what is missing is loaded as well."""
    run(store, layouts)
    kv = GroupKv(layouts)
    kv.device_match = lambda _: 6 * T
    kv.max_matched = lambda position: 0
    with WindowEngine(llm_args(store, layouts), kv=kv) as bench:
        assert bench.answer(PROMPT, GENERATE) == reference(PROMPT, layouts, GENERATE)


@pytest.mark.parametrize("lost", [0, 5, 8, 9])
def test_without_a_block_of_one_group_the_hit_steps_back_or_does_not_need_it(
    store: DictStore, lost: int
) -> None:
    run(store, FULL_AND_WINDOW, save_partial_tails=False)
    store.capabilities = replace(store.capabilities, enumerable=False)
    keys = keys_of(PROMPT, FULL_AND_WINDOW)
    answer = reference(PROMPT, FULL_AND_WINDOW, GENERATE)
    del store.frames[store_key(keys[lost], 1)]
    covered = blocks_needed(10, 10 * T, T)
    expected = lost * T if lost in covered else 10 * T
    assert run(store, FULL_AND_WINDOW) == (answer, expected)
    # What was computed is offered again.
    assert (store_key(keys[lost], 1) in store.frames) is (lost in covered)
    assert is_sound(store, PROMPT, FULL_AND_WINDOW)


@pytest.mark.parametrize("lost", [0, 4, 9])
def test_a_block_that_full_attention_lacks_ends_the_hit(store: DictStore, lost: int) -> None:
    run(store, TWO_WINDOWS, save_partial_tails=False)
    store.capabilities = replace(store.capabilities, enumerable=False)
    del store.frames[store_key(keys_of(PROMPT, TWO_WINDOWS)[lost], 0)]
    answer = reference(PROMPT, TWO_WINDOWS, GENERATE)
    assert run(store, TWO_WINDOWS) == (answer, lost * T)
    assert run(store, TWO_WINDOWS) == (answer, 10 * T)


@pytest.mark.parametrize("layouts", [PLAIN, FULL_AND_WINDOW])
def test_a_prompt_that_leaves_the_stored_path_inside_a_block_keeps_what_is_common(
    store: DictStore, layouts: Layouts
) -> None:
    run(store, layouts)
    branch = PROMPT[: 5 * T + 2] + [77] * 9
    assert run(store, layouts, branch) == (reference(branch, layouts, GENERATE), 5 * T + 2)


def test_a_group_that_changes_its_shape_or_window_finds_nothing(store: DictStore) -> None:
    run(store, FULL_AND_WINDOW)
    full, window = FULL_AND_WINDOW
    for changed in (layout(11, *window.layers, head_dim=64), layout(10, *window.layers)):
        others = (full, changed)
        assert run(store, others) == (reference(PROMPT, others, GENERATE), 0)


def test_blocks_say_what_stores_may_want_to_know(store: DictStore, layouts: Layouts) -> None:
    answer, _ = run(store, layouts, chunk=5)
    tokens = np.array(PROMPT + answer, np.int32)[:-1]  # the last one has no KV
    for group, one in enumerate(layouts):
        own = [block for block in store.blocks if block.group == group]
        assert {len(block.data) for block in own} == {frame.frame_nbytes(one.block_nbytes)}
        key = root_key(b"d" * 32, layouts, Namespace())
        parts = [tokens[start : start + T] for start in range(0, len(tokens), T)]
        for block, part in zip(own, parts, strict=True):
            assert block.parent == store_key(key, group)
            key = chain_key(key, part)
            assert block.key == store_key(key, group)
            assert block.tokens.tolist() == part.tolist()
            assert (block.priority, block.namespace) == (35, Namespace().tag())


def test_a_stored_block_is_not_written_again(store: DictStore, layouts: Layouts) -> None:
    run(store, layouts)
    saved = [key for keys in store.saves for key in keys]
    assert len(saved) == len(set(saved))
    run(store, layouts)
    again = [key for keys in store.saves for key in keys][len(saved) :]
    assert len(again) <= 2 * len(layouts)


@pytest.mark.parametrize("slots", [1, 2, 3, 64])
def test_little_staging_memory_is_enough_to_load(
    store: DictStore, layouts: Layouts, slots: int
) -> None:
    run(store, layouts)
    nbytes = slots * max(frame.frame_nbytes(one.block_nbytes) for one in layouts)
    answer = reference(PROMPT, layouts, GENERATE)
    assert run(store, layouts, staging_bytes=nbytes) == (answer, len(PROMPT) - 1)


def test_a_drop_leaves_what_a_window_gave_up_and_the_end_can_be_found(layouts: Layouts) -> None:
    """One slot: nearly everything is dropped while the prompt is computed in chunks."""
    store = DictStore()
    nbytes = max(frame.frame_nbytes(one.block_nbytes) for one in layouts)
    answer = reference(PROMPT, layouts, GENERATE)
    assert run(store, layouts, chunk=T, staging_bytes=nbytes) == (answer, 0)
    assert is_sound(store, PROMPT + answer, layouts)
    # The conversation goes on.
    assert run(store, layouts, [*PROMPT, *answer], 1)[1] == len(PROMPT) + GENERATE - 1
    for length in range(T, 10 * T, T):
        branch = PROMPT[:length] + [88] * 3
        assert run(store, layouts, branch, 1)[0] == reference(branch, layouts)


def test_save_on_finish_saves_what_is_left(store: DictStore) -> None:
    answer = reference(PROMPT, FULL_AND_WINDOW, GENERATE)
    assert run(store, FULL_AND_WINDOW, chunk=5, save_on="finish") == (answer, 0)
    groups = [sum(block.group == group for block in store.blocks) for group in (0, 1)]
    assert groups == [11, len(blocks_needed(10, len(PROMPT) + GENERATE - 1, T))]
    assert run(store, FULL_AND_WINDOW, PROMPT + answer)[1] == len(PROMPT) + GENERATE - 1


def test_a_late_lookup_does_not_keep_windows_from_being_saved(layouts: Layouts) -> None:
    store = DictStore()
    store.at_lookup.shut()
    args = llm_args(store, layouts, lookup_timeout_ms=0)
    with WindowEngine(args, chunk=3) as bench:
        request = bench.submit(PROMPT, GENERATE)
        for _ in range(12):
            bench.step()
        store.open_doors()
        bench.run()
        answer = request.tokens.view[len(PROMPT) :].tolist()
    assert answer == reference(PROMPT, layouts, GENERATE)
    assert is_sound(store, PROMPT + answer, layouts)
    assert run(store, layouts)[1] == len(PROMPT) - 1
    branch = [*PROMPT[: 5 * T], 88]
    assert run(store, layouts, branch, 1)[1] == 5 * T


@pytest.mark.parametrize("save_on", ["full", "finish"])
def test_a_preempted_request_is_saved_before_its_blocks_go(
    store: DictStore, layouts: Layouts, save_on: str
) -> None:
    answer = reference(PROMPT, layouts, GENERATE)
    with WindowEngine(llm_args(store, layouts, save_on=save_on), chunk=5) as bench:
        request = bench.submit(PROMPT, GENERATE)
        for _ in range(4):
            bench.step()
        bench.preempt(request)
        assert bench.kv.all_free()
        assert all(bool((pool == GARBAGE).all()) for pool in bench.kv.pools)
        bench.run()
        assert request.tokens.view[len(PROMPT) :].tolist() == answer
    assert is_sound(store, PROMPT, layouts)
    assert run(store, layouts, [*PROMPT, *answer], 1)[1] == len(PROMPT) + GENERATE - 1


def test_with_blocks_in_host_memory(layouts: Layouts) -> None:
    answer = reference(PROMPT, layouts, GENERATE)
    with WindowEngine(llm_args(MemoryBackend(16 << 20), layouts), chunk=7) as bench:
        assert bench.answer(PROMPT, GENERATE) == answer
        bench.manager._worker._queue.flush(60)
        assert bench.answer(PROMPT, GENERATE) == answer
        assert bench.store_tokens[max(bench.requests)] == len(PROMPT) - 1


def test_with_blocks_on_disk(tmp_path: Path, layouts: Layouts) -> None:
    url = f"disk://{tmp_path}?capacity=16MiB"
    answer = reference(PROMPT, layouts, GENERATE)
    assert run(url, layouts, chunk=7) == (answer, 0)
    assert run(url, layouts, chunk=7) == (answer, len(PROMPT) - 1)


def test_a_small_store_that_drops_blocks_never_gives_a_wrong_token(layouts: Layouts) -> None:
    prompts = [PROMPT[: T * (2 + n % 8) + n % 3] + [100 + n % 5] * 5 for n in range(24)]
    largest = max(frame.frame_nbytes(one.block_nbytes) for one in layouts)
    room = MemoryBackend(30 * len(layouts) * largest)
    with WindowEngine(llm_args(room, layouts), chunk=9) as bench:
        for prompt in prompts:
            assert bench.answer(prompt, 2) == reference(prompt, layouts, 2)
            bench.manager._worker._queue.flush(60)
        assert sum(bench.store_tokens.values()) > 0


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Layouts, list[list[int]]]:
    windows = draw(st.lists(st.integers(1, 20), min_size=1, max_size=2, unique=True))
    groups: list[int | None] = sorted(windows, reverse=True)
    if draw(st.booleans()):
        groups.insert(0, None)
    prompt = st.integers(0, 2).flatmap(
        lambda seed: st.integers(1, 40).map(
            lambda n: [(seed * i) // 9 + i for i in range(1, n + 1)]
        )
    )
    prompts = draw(st.lists(prompt, min_size=2, max_size=4))
    return tuple(layout(window, number) for number, window in enumerate(groups)), prompts


@settings(max_examples=40)
@given(worlds(), st.data())
def test_whatever_the_store_has_lost_no_token_is_wrong(
    world: tuple[Layouts, list[list[int]]], data: st.DataObject
) -> None:
    layouts, prompts = world
    store = DictStore(enumerable=data.draw(st.booleans()))
    for prompt in prompts:
        chunk = data.draw(st.integers(1, 30))
        slots = data.draw(st.sampled_from([1, 3, 100])) * frame.frame_nbytes(64)
        answer, _ = run(store, layouts, prompt, 3, chunk, staging_bytes=slots)
        assert answer == reference(prompt, layouts, 3)
        kept = sorted(store.frames)
        for number in data.draw(st.lists(st.integers(0, 30), max_size=4)):
            if number < len(kept):
                store.frames.pop(kept[number], None)
