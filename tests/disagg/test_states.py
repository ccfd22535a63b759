"""Prompts of recurrent models go from engine to engine with the states at their end."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import (
    PREFILL,
    T,
    address_of,
    hands_out,
    held_by,
    leaks_nothing,
    prompt_of,
    result_of,
    until,
)
from families import write_tiny
from free_ports import free_ports
from transformers import AutoModelForCausalLM

from kvconnect import LLM, SamplingParams
from kvconnect.connector.data import KvCachePool
from kvconnect.connector.disagg.pools import end_of_transfer, peer_layouts, peer_pools
from kvconnect.connector.disagg.publisher import Publisher
from kvconnect.engine.beside_loads import BesideLoads
from kvconnect.layout import KvCacheLayout, StateTensor

ANSWER = SamplingParams(max_tokens=10)
# Shorter and longer than a block, at the end of one, behind it; chunks end within blocks.
LENGTHS = (2, 16, 17, 64, 71, 100)
LESS_OFTEN = ["falcon_h1", "lfm2", "kimi_linear", "mamba2", "minimax", "nemotron_h", "zaya"]
FAMILIES = [
    "qwen3_next",
    *(pytest.param(family, marks=pytest.mark.slow) for family in LESS_OFTEN),
]


def whole(length: int) -> int:
    """The tokens of a prompt of `length` that are fetched."""
    return (length - 1) // T * T


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda family: write_tiny(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="session")
def generated(tiny) -> Callable[[list[int], str], list[int]]:
    """What ``transformers.generate()`` answers, in float64."""

    @cache
    def model(family: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(
            tiny(family), dtype=torch.float64, experts_implementation="eager"
        )

    def answer(prompt: list[int], family: str = "qwen3_next") -> list[int]:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model(family).generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
        return out[0, len(prompt) :].tolist()

    return answer


def answered(decode: LLM, prompt: list[int], carried: Any) -> tuple[list[int], int]:
    return result_of(decode.submit(prompt, ANSWER, kv_transfer_params=carried))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_answer_is_that_of_generate(family, tiny, open_one, generated, counted):
    prefill = open_one("prefill", tiny(family), max_num_tokens=24)
    decode = open_one("decode", tiny(family))
    address = address_of(prefill)
    for length in LENGTHS:
        prompt = prompt_of(length)
        (first,) = prefill.generate([prompt], PREFILL, kv_transfer_params={"do": "prefill"})
        carried = first.kv_transfer_params
        assert carried["tokens"] == whole(length)
        assert answered(decode, prompt, carried) == (generated(prompt, family), whole(length))
    handles = []
    for length in LENGTHS:  # one is read while it is computed
        prompt = prompt_of(length, seed=1)
        here, there = hands_out(address, f"{family}-{length}")
        handles.append((prompt, decode.submit(prompt, ANSWER, kv_transfer_params=there)))
        prefill.submit(prompt, PREFILL, kv_transfer_params=here)
    for prompt, handle in handles:
        assert result_of(handle) == (generated(prompt, family), whole(len(prompt)))
    assert counted["transfer.fetched"] == 2 * sum(map(bool, map(whole, LENGTHS)))
    leaks_nothing(prefill, decode)
    until(lambda: held_by(prefill).keys() | held_by(decode).keys() <= {"users of links"})


@pytest.mark.parametrize("in_parts", [False, True])
def test_what_either_side_has_is_used(in_parts, tiny, open_one, generated, monkeypatch):
    """A prefill that matches all of a prompt hands out the snapshot that it starts from."""
    if in_parts:  # as large states are, of which connectors have a layout for each part
        divided = KvCacheLayout.divided
        monkeypatch.setattr(KvCacheLayout, "divided", lambda layout: divided(layout, 1))
    model = tiny("qwen3_next")
    prefill, decode = open_one("prefill", model), open_one("decode", model)
    prompt = prompt_of(100)
    prefill.generate([prompt], PREFILL)
    (first,) = prefill.generate([prompt], PREFILL, kv_transfer_params={"do": "prefill"})
    assert first.reused_device_tokens == 96
    decode.generate([prompt[:50]], PREFILL)
    assert answered(decode, prompt, first.kv_transfer_params) == (generated(prompt), 48)
    longer = [*prompt, *generated(prompt), 7, 8, 9]  # the next turn
    (output,) = decode.generate([longer], ANSWER)
    assert list(output.output_token_ids) == generated(longer)
    assert output.reused_device_tokens == 96
    leaks_nothing(prefill, decode)


@pytest.mark.parametrize(("length", "num_tokens"), [(65, 64), (64, 0)])
def test_a_prefill_that_generates_keeps_the_states_up_to_the_next_block(
    length, num_tokens, tiny, open_one, generated
):
    model = tiny("qwen3_next")
    prefill, decode = open_one("prefill", model), open_one("decode", model)
    prompt = prompt_of(length)
    one = SamplingParams(max_tokens=1)
    (first,) = prefill.generate([prompt], one, kv_transfer_params={"do": "prefill"})
    assert first.kv_transfer_params["tokens"] == num_tokens
    assert answered(decode, prompt, first.kv_transfer_params) == (generated(prompt), num_tokens)
    leaks_nothing(prefill, decode)


def test_a_store_beside_the_transfer_has_the_states_too(tiny, open_one, generated, tmp_path):
    model = tiny("qwen3_next")
    store = {"url": f"disk://{tmp_path}/kv?capacity=64MiB", "lookup_timeout_ms": 60_000}
    store["overlap_loads"] = False
    prefill = open_one("prefill", model, connector=store)
    decode = open_one("decode", model, connector=store)
    fetched, stored = prompt_of(100), prompt_of(70)
    prefill.generate([stored], PREFILL)
    (first,) = prefill.generate([fetched], PREFILL, kv_transfer_params={"do": "prefill"})
    assert answered(decode, fetched, first.kv_transfer_params) == (generated(fetched), 96)
    leaks_nothing(prefill, decode)
    prefill.close()
    assert answered(decode, stored, None) == (generated(stored), 64)
    decode.close()
    again = open_one("both", model, connector=store)
    assert answered(again, fetched, None) == (generated(fetched), 96)


def test_states_that_were_loaded_beside_computing_are_published(
    tiny, open_one, generated, tmp_path, monkeypatch
):
    model, prompt = tiny("qwen3_next"), prompt_of(100)
    store = {"url": f"disk://{tmp_path}/kv?capacity=64MiB", "lookup_timeout_ms": 60_000}
    prefill = open_one("prefill", model, connector=store)
    decode = open_one("decode", model)
    prefill.generate([prompt], PREFILL)
    until(prefill.reset_prefix_cache)
    assert prefill._engine._connector._worker._saves.flush(60)
    monkeypatch.setattr(BesideLoads, "is_worth", lambda *_: True)
    monkeypatch.setattr(
        BesideLoads, "chunk", lambda _, request, *__, **___: 0 if request.num_computed_tokens else T
    )
    (first,) = prefill.generate([prompt], PREFILL, kv_transfer_params={"do": "prefill"})
    assert first.reused_store_tokens in {80, 96}
    assert answered(decode, prompt, first.kv_transfer_params) == (generated(prompt), 96)
    leaks_nothing(prefill, decode)


def test_the_states_that_a_peer_may_read_are_held(tiny, open_one):
    """Also those before the last block of a prompt that fills it."""
    prefill = open_one("prefill", tiny("qwen3_next"), transfer={"lease_s": 60.0})
    for length in (64, 65, 100):
        prefill.generate([prompt_of(length)], PREFILL, kv_transfer_params={"do": "prefill"})
        *_, request = prefill._engine._scheduler.saving.values()
        ids = prefill._engine._kv.get_group_cache_indices([request], 1)[request.request_id]
        held = [number for number, block in enumerate(ids) if block >= 0]
        assert held == [whole(length) // T - 1]


# ---------------------------------------------------------------- torn transfers


@pytest.mark.parametrize("no_states", ["no block", "no chunks"])
def test_a_prompt_without_its_states_is_not_handed_out(no_states, tiny, open_one, generated):
    model, chunked = tiny("qwen3_next"), no_states != "no chunks"
    prefill = open_one("prefill", model, enable_chunked_prefill=chunked)
    decode = open_one("decode", model)
    if chunked:
        prefill._engine._kv.state_snapshot = lambda *_: None
    prompt = prompt_of(100)
    (first,) = prefill.generate([prompt], PREFILL, kv_transfer_params={"do": "prefill"})
    assert first.kv_transfer_params["tokens"] == 0
    assert answered(decode, prompt, first.kv_transfer_params) == (generated(prompt), 0)
    here, there = hands_out(address_of(prefill), "at the same time")
    handle = decode.submit(other := prompt_of(100, seed=3), ANSWER, kv_transfer_params=there)
    prefill.submit(other, PREFILL, kv_transfer_params=here)
    assert result_of(handle) == (generated(other), 0)
    leaks_nothing(prefill, decode)


def test_a_prompt_whose_states_do_not_come_is_computed(tiny, open_one, generated, monkeypatch):
    untold = Publisher._untold

    def without_states(*args):
        found = untold(*args)
        return (*found[:-1], ()) if found else ()

    monkeypatch.setattr(Publisher, "_untold", without_states)
    model = tiny("qwen3_next")
    prefill = open_one("prefill", model)
    decode = open_one("decode", model, transfer={"claim_timeout_s": 0.5})
    prompt = prompt_of(100)
    (first,) = prefill.generate([prompt], PREFILL, kv_transfer_params={"do": "prefill"})
    assert first.kv_transfer_params["tokens"] == 96
    assert answered(decode, prompt, first.kv_transfer_params) == (generated(prompt), 0)
    leaks_nothing(prefill, decode)


def test_engines_with_blocks_of_other_sizes_share_no_states(tiny, open_one, generated):
    model = tiny("qwen3_next")
    prefill = open_one("prefill", model, transfer={"lease_s": 0.3})
    decode = open_one("decode", model, tokens_per_block=8)
    for length in (100, 90):  # 88 is the end of a block of 8 alone
        prompt = prompt_of(length)
        (first,) = prefill.generate([prompt], PREFILL, kv_transfer_params={"do": "prefill"})
        assert answered(decode, prompt, first.kv_transfer_params) == (generated(prompt), 0)
    leaks_nothing(prefill, decode)


# ---------------------------------------------------------------- ranks


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), [(2, 2), (1, 2), (2, 1)])
def test_ranks_read_the_states_of_the_first_rank(ours, theirs, tiny, start_one, generated):
    prefill = start_one(
        "prefill",
        tiny("qwen3_next"),
        tensor_parallel_size=theirs,
        max_num_tokens=24,
        transfer={"listen": f"127.0.0.1:{free_ports(theirs)}"},
    )
    decode = start_one("decode", tiny("qwen3_next"), tensor_parallel_size=ours)
    for length in LENGTHS:
        prompt = prompt_of(length)
        prefill.ask("submit", prompt, PREFILL, {"do": "prefill"})
        _, _, carried = prefill.ask("result")
        decode.ask("submit", prompt, ANSWER, carried)
        tokens, fetched, _ = decode.ask("result")
        assert (tokens, fetched) == (generated(prompt), whole(length))
    for process in (prefill, decode):
        until(lambda one=process: one.ask("held").keys() <= {"users of links"})
        process.end_well()


# ---------------------------------------------------------------- pools


def test_states_that_stores_keep_in_parts_are_one_pool_for_peers():
    keys = KvCacheLayout(1, 1, 4, 4, T, torch.float32)
    tensors = [StateTensor(number, "recurrent0", (8,), torch.float32) for number in (1, 2, 3)]
    states = KvCacheLayout.of_states(tensors, T)
    parts = states.divided(2 * states.layer_nbytes)
    assert [part.num_layers for part in parts] == [2, 1]
    assert peer_layouts([keys, *parts]) == (keys, states)
    memory = torch.arange(5 * states.block_nbytes).to(torch.uint8).view(states.flat_shape(5))
    pools = [KvCachePool(keys, torch.zeros(keys.flat_shape(5)))]
    pools += [KvCachePool(parts[0], memory[:, :2]), KvCachePool(parts[1], memory[:, 2:])]
    first, last = peer_pools(pools)
    assert first is pools[0]
    assert last.layout == states
    assert last.tensor.is_contiguous()
    assert last.tensor.data_ptr() == memory.data_ptr()
    assert torch.equal(last.tensor, memory)


def test_a_transfer_ends_with_a_block_if_there_are_states():
    keys = KvCacheLayout(1, 1, 4, 4, T, torch.float32)
    states = KvCacheLayout.of_states([StateTensor(1, "conv0", (8,), torch.float32)], T)
    lengths = (1, 16, 17, 32, 33, 40)
    assert [end_of_transfer(one, [keys]) for one in lengths] == [0, 15, 16, 31, 32, 39]
    assert [end_of_transfer(one, [keys, states]) for one in lengths] == [0, 0, 16, 16, 32, 32]
