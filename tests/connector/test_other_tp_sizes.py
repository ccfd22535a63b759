"""What one tensor parallelism saved, another loads: each head once, in its place."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import DictStore
from tp_ranks import DIGEST, LATENT, UNEQUAL, T, layout, on_store
from waiting import until

from kvconnect import frame
from kvconnect.backend import Capabilities
from kvconnect.connector.data import TransferFailure
from kvconnect.connector.io.lookup import Lookup
from kvconnect.explain.outcome import Outcome
from kvconnect.keys import BlockKey, KeyChain, Namespace, Shard, root_key, store_key
from kvconnect.layout import KvCacheLayout
from kvconnect.shards import stored_heads
from kvconnect.tokens import TokenBuffer

PROMPT = list(range(1, 5 * T + 3))  # five blocks and two tokens
MODELS = {
    "many heads": (layout(4),),
    "fewer heads than ranks": (layout(2),),
    "latent": (LATENT,),
    "keys wider than values": (UNEQUAL,),
    "a window, and fewer heads in it": (layout(4), layout(2, window=6)),
}
SIZES = [(1, 2), (2, 1), (4, 1), (2, 4)]


def shared_store(*, enumerable: bool = True) -> DictStore:
    store = DictStore(enumerable=enumerable)
    store.capabilities = Capabilities(enumerable=enumerable, shared=True)
    return store


def run(store: object, wholes: Sequence[KvCacheLayout], tp_size: int, *prompts: list[int]) -> int:
    """One life of an engine of so many ranks: what the last of `prompts` had from the store."""
    with on_store(store, wholes, tp_size) as ranks:
        return [ranks.run(prompt) for prompt in prompts or [PROMPT]][-1]


@pytest.mark.parametrize(("saved_by", "loaded_by"), SIZES)
@pytest.mark.parametrize("wholes", MODELS.values(), ids=MODELS)
def test_all_but_the_last_token_comes_back(
    wholes: tuple[KvCacheLayout, ...], saved_by: int, loaded_by: int
) -> None:
    store = shared_store()
    assert run(store, wholes, saved_by) == 0
    num_frames = len(store.frames)
    assert run(store, wholes, loaded_by) == len(PROMPT) - 1
    # What is there in other shares is not saved anew; of the tail only its first token was used.
    assert len(store.frames) <= num_frames + len(wholes) * loaded_by


def test_parts_of_a_prompt_that_different_sizes_saved_are_loaded_together() -> None:
    store = shared_store()
    whole = (layout(4),)
    for length, tp_size in ((2 * T, 1), (3 * T, 2), (4 * T, 4)):
        run(store, whole, tp_size, PROMPT[:length])
    assert len(store.frames) == 2 + 2 + 4
    for tp_size in (1, 2, 4):
        assert run(store, whole, tp_size, PROMPT[: 4 * T + 1]) == 4 * T


def test_more_changes_than_are_looked_for_are_a_shorter_hit() -> None:
    store = shared_store(enumerable=False)
    whole, prompt = (layout(4),), [*PROMPT, *range(4 * T)]
    for tp_size in (1, 2):
        run(one := shared_store(enumerable=False), whole, tp_size, prompt)
        for number, key in enumerate(keys_of(whole, prompt)):
            if number % 2 == tp_size - 1:
                shards = [Shard(rank, tp_size) for rank in range(tp_size)]
                stored = [store_key(key, 0, shard) for shard in shards]
                store.frames |= {name: one.frames[name] for name in stored}
    assert run(store, whole, 1, prompt) == 5 * T  # its own, and four times another


@pytest.mark.parametrize(("wholes", "tp_size"), [((LATENT,), 4), ((layout(2),), 4)])
def test_what_several_ranks_hold_is_saved_once(
    wholes: tuple[KvCacheLayout, ...], tp_size: int
) -> None:
    one, many = shared_store(), shared_store()
    heads = wholes[0].num_kv_heads
    run(one, wholes, heads)
    run(many, wholes, tp_size)
    assert sorted(key for keys in many.saves for key in keys) == sorted(many.frames)
    assert {key: data.tolist() for key, data in many.frames.items()} == {
        key: data.tolist() for key, data in one.frames.items()
    }


def test_where_each_rank_sees_its_own_blocks_only_each_saves_them() -> None:
    store = DictStore()
    run(store, (LATENT,), 2)
    saved = [key for keys in store.saves for key in keys]
    assert len(saved) == 2 * len(store.frames)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("missing", [0, 1])
def test_a_prefix_counts_as_far_as_all_shares_are_there(tp_size: int, missing: int) -> None:
    store = shared_store(enumerable=False)
    whole = (layout(4),)
    run(store, whole, 2)
    key = store_key(keys_of(whole)[3], 0, Shard(missing, 2))
    del store.frames[key]
    assert run(store, whole, tp_size) == 3 * T
    assert key not in {one for keys in store.loads for one in keys}  # nobody found it


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 1)])
def test_a_damaged_block_ends_the_load_and_is_dropped(saved_by: int, loaded_by: int) -> None:
    store = shared_store(enumerable=False)
    whole = (layout(4),)
    run(store, whole, saved_by)
    bad = store_key(keys_of(whole)[3], 0, Shard(saved_by - 1, saved_by))
    store.frames[bad][frame.HEADER_NBYTES + 5] ^= 1
    with on_store(store, whole, loaded_by) as ranks:
        assert ranks.run(PROMPT) == 3 * T
        assert Outcome.DAMAGED in ranks.losses
    assert bad not in store.frames


@pytest.mark.parametrize("saved_by", [1, 2])
def test_a_block_that_is_gone_by_its_load_counts_as_evicted(saved_by: int) -> None:
    store = shared_store(enumerable=False)
    whole = (layout(4),)
    run(store, whole, saved_by)
    with on_store(store, whole, 1) as ranks:
        store.at_load.shut()
        ranks.begin(PROMPT, None, range(1, 7))
        store.at_load.await_caller()
        del store.frames[store_key(keys_of(whole)[3], 0, Shard(0, saved_by))]
        store.open_doors()
        failures: list[TransferFailure] = []

        def failed() -> bool:
            ranks.workers[0].get_finished([], [])
            failures.extend(ranks.workers[0].get_failed())
            return bool(failures)

        until(failed)
    assert [(one.num_valid_tokens, one.loss) for one in failures] == [(3 * T, Outcome.EVICTED)]


def test_a_block_of_another_shape_is_a_damaged_one() -> None:
    """Also one that the store was opened for, sound and just as long."""
    store = shared_store(enumerable=False)
    whole = layout(4)
    run(store, (whole,), 1)
    key = store_key(keys_of((whole,))[3])
    other = layout(2)
    data = store.frames[key]
    assert frame.frame_nbytes(other.block_nbytes) == data.numel()
    frame.seal(data, frame.FrameHeader(T, other.block_nbytes, other.fingerprint(), key))
    assert run(store, (whole,), 2) == 3 * T
    assert key not in store.frames


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_store_that_answers_too_late_keeps_what_it_writes_into(tp_size: int) -> None:
    store = shared_store(enumerable=False)
    whole = (layout(4),)
    run(store, whole, 1)
    with on_store(store, whole, tp_size, load_timeout_s=0.3, save_timeout_s=0.3) as ranks:
        store.at_load.shut()
        assert ranks.run(PROMPT) == 0
        held = []
        for worker in ranks.workers:
            access = worker._access
            until(lambda: access.store.backend._calls.numbers()["abandoned"])  # noqa: B023
            access.store.io.submit(asyncio.sleep(0)).result(60)
            [memory] = access.reader._arrivals.values() or [access.staging]
            held.append(memory.num_slots - memory.num_free)
        store.open_doors()
        assert held == [5] * tp_size
        until(lambda: memory.num_free == memory.num_slots)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_little_memory_is_enough(tp_size: int) -> None:
    store = shared_store()
    whole = (layout(4),)
    run(store, whole, 4)
    slot = frame.frame_nbytes(whole[0].block_nbytes)
    with on_store(store, whole, tp_size, staging_bytes=2 * slot) as ranks:
        assert ranks.run(PROMPT) == len(PROMPT) - 1


def test_an_unknown_prompt_costs_one_more_question_for_each_size() -> None:
    for heads, tp_size, most in ((1, 1, 1), (4, 1, 3), (4, 4, 3), (8, 1, 4)):
        store = shared_store(enumerable=False)
        run(store, (layout(heads),), tp_size)
        assert len(store.lookups) == most
        # Whatever the length of the prompt: of other sizes its first block is asked for.
        assert sum(map(len, store.lookups)) <= 5 * tp_size + sum(1 << n for n in range(most))


@pytest.mark.parametrize(
    "url", ["disk://{0}?capacity=16MiB", "disk://{0}?capacity=16MiB&codec=zstd"]
)
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 2), (2, 1), (2, 4)])
def test_after_a_restart_from_disk(tmp_path: Path, url: str, saved_by: int, loaded_by: int) -> None:
    url = url.format(tmp_path)
    wholes = (layout(4), layout(2, window=6))
    assert run(url, wholes, saved_by) == 0
    assert run(url, wholes, loaded_by) == len(PROMPT) - 1


@settings(max_examples=8)
@given(st.data())
def test_whatever_was_saved_by_whom_and_lost_again_nothing_wrong_is_loaded(
    data: st.DataObject,
) -> None:
    store = shared_store(enumerable=data.draw(st.booleans(), "enumerable"))
    wholes = data.draw(st.sampled_from(list(MODELS.values())))
    for _ in range(data.draw(st.integers(2, 4))):
        length = data.draw(st.integers(1, 9 * T))
        branch = data.draw(st.integers(0, length))
        prompt = [*range(branch), *range(100, 100 + length - branch)]
        run(store, wholes, data.draw(st.sampled_from([1, 2, 4])), prompt)
        for number in data.draw(st.sets(st.integers(0, 8), max_size=3)):
            for key in sorted(store.frames)[number : number + 1]:
                del store.frames[key]


def test_blocks_in_other_shares_do_not_count_for_a_caller_that_cannot_join_them() -> None:
    store = shared_store(enumerable=False)
    whole = (layout(4),)
    run(store, whole, 2)
    heads, chain = stored_heads(whole, Shard()), chain_of(whole)
    assert asyncio.run(Lookup(store, heads).find(chain)).end == 5 * T
    assert asyncio.run(Lookup(store, heads, own_shares=True).find(chain)).end == 0


def chain_of(wholes: Sequence[KvCacheLayout], prompt: Sequence[int] = PROMPT) -> KeyChain:
    root = root_key(DIGEST, wholes, Namespace())
    return KeyChain(root, T, TokenBuffer(np.array(prompt, np.int32)))


def keys_of(wholes: Sequence[KvCacheLayout], prompt: Sequence[int] = PROMPT) -> list[BlockKey]:
    """Chained keys of the prompt's blocks."""
    return chain_of(wholes, prompt).keys()
