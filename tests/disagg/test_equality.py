"""What one engine computes and another goes on from is what one engine alone answers."""

from __future__ import annotations

import pytest
from engines import (
    ANSWER,
    PREFILL,
    T,
    address_of,
    hand_over,
    hands_out,
    is_claimed,
    leaks_nothing,
    nbytes_read,
    node_of,
    prompt_of,
    result_of,
    until,
)
from families import write_tiny

from kvconnect.trace import metrics

_FREED = ("transfer.leased_bytes", "transfer.quarantined_blocks")
# Shorter and longer than a block, a window of 24 and a chunk; one ends where a window's block does.
LENGTHS = (2, 17, 39, 71, 100)
BESIDE = (17, 71, 100)  # of prompts that are read while they are computed
MORE = ["qwen3", "mistral", "gpt2", "qwen2", "mixtral", "phi", "gemma", "olmo", "gpt_neox", "opt"]
ARCHITECTURES = [
    *("llama", "gemma3", "deepseek_v3"),
    *(pytest.param(arch, marks=pytest.mark.slow) for arch in MORE),
]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_answer_is_that_of_one_engine(arch, model_of, open_one, answer_of, counted):
    prefill = open_one("prefill", model_of(arch), max_num_tokens=48)
    decode = open_one("decode", model_of(arch))
    address = address_of(prefill)
    for length in LENGTHS:
        prompt = prompt_of(length)
        (first,) = prefill.generate([prompt], PREFILL, kv_transfer_params={"do": "prefill"})
        assert first.output_token_ids == ()
        (output,) = decode.generate([prompt], ANSWER, kv_transfer_params=first.kv_transfer_params)
        assert list(output.output_token_ids) == answer_of(prompt, arch)
        assert (output.reused_store_tokens, output.computed_tokens) == (length - 1, 1)
    handles = []
    for length in BESIDE:
        prompt = prompt_of(length, seed=1)
        here, there = hands_out(address, f"{arch}-{length}")
        handles.append((prompt, decode.submit(prompt, ANSWER, kv_transfer_params=there)))
        prefill.submit(prompt, PREFILL, kv_transfer_params=here)
    for prompt, handle in handles:
        output = handle.result(60)
        assert list(output.output_token_ids) == answer_of(prompt, arch)
        assert (output.reused_store_tokens, output.computed_tokens) == (len(prompt) - 1, 1)
    assert counted["transfer.fetched"] == len(LENGTHS) + len(BESIDE)
    leaks_nothing(prefill, decode)


def test_keys_of_an_index_travel_with_the_latents(open_one, tmp_path):
    model = write_tiny(tmp_path, "deepseek_v32", index_topk=8)
    prefill, decode = open_one("prefill", model, max_num_tokens=48), open_one("decode", model)
    for length in LENGTHS[1:]:
        prompt = prompt_of(length)
        (whole,) = prefill.generate([prompt], ANSWER)
        answer = list(whole.output_token_ids)
        assert hand_over(prefill, decode, prompt) == (answer, length - 1)
    leaks_nothing(prefill, decode)


@pytest.mark.parametrize("transport", ["nixl"], indirect=True)
def test_the_answer_is_that_of_one_engine_over_nixl(transport, open_one, answer_of):
    prefill = open_one("prefill", max_num_tokens=48)
    decode = open_one("decode")
    prompt = prompt_of(100)
    here, there = hands_out(address_of(prefill), "over nixl")
    handle = decode.submit(prompt, ANSWER, kv_transfer_params=there)
    prefill.submit(prompt, PREFILL, kv_transfer_params=here)
    assert result_of(handle) == (answer_of(prompt), 99)
    leaks_nothing(prefill, decode)


def test_what_the_reader_has_is_not_fetched(open_one, answer_of, counted):
    prefill, decode = open_one("prefill"), open_one("decode")
    prompt = prompt_of(100)
    decode.generate([prompt[:50]], PREFILL)
    (first,) = prefill.generate([prompt], PREFILL, kv_transfer_params={"do": "prefill"})
    (output,) = decode.generate([prompt], ANSWER, kv_transfer_params=first.kv_transfer_params)
    assert list(output.output_token_ids) == answer_of(prompt)
    assert (output.reused_device_tokens, output.reused_store_tokens) == (48, 51)
    assert counted["transfer.fetched.tokens"] == 99 - 3 * T
    assert counted["transfer.computed"] == counted["transfer.lease.granted"] == 1
    leaks_nothing(prefill, decode)


def test_who_is_connected_and_what_is_leased_can_be_watched(open_one):
    def told() -> dict[str, float]:
        return {one.name: one.value for one in metrics.gauges() if one.name.startswith("transfer.")}

    prefill, decode = open_one("prefill"), open_one("decode")
    assert set(told().values()) == {0}
    prompt = prompt_of(40)
    (first,) = prefill.generate([prompt], PREFILL, kv_transfer_params={"do": "prefill"})
    assert told()["transfer.leased_bytes"] == 3 * prefill.layout.block_nbytes
    decode.generate([prompt], ANSWER, kv_transfer_params=first.kv_transfer_params)
    connected = {"transfer.peers.readers": 1, "transfer.peers.sources": 1}
    until(lambda: told() == connected | dict.fromkeys(_FREED, 0))
    decode.close()
    until(lambda: told() == {"transfer.peers.readers": 0, "transfer.leased_bytes": 0})
    prefill.close()
    assert told() == {}


def test_both_roles_in_one_engine_each_way(open_one, answer_of):
    one, other = open_one("both"), open_one("both")
    for giver, taker, seed in ((one, other, 1), (other, one, 2)):
        prompt = prompt_of(70, seed)
        assert hand_over(giver, taker, prompt) == (answer_of(prompt), 69)
    leaks_nothing(one, other)


def test_a_prefill_that_samples_a_token_is_handed_out_too(open_one, answer_of):
    prefill, decode = open_one("prefill"), open_one("decode")
    prompt = prompt_of(70)
    one = ANSWER.model_copy(update={"max_tokens": 1})
    (first,) = prefill.generate([prompt], one, kv_transfer_params={"do": "prefill"})
    (output,) = decode.generate([prompt], ANSWER, kv_transfer_params=first.kv_transfer_params)
    assert list(output.output_token_ids) == answer_of(prompt)
    assert first.output_token_ids == output.output_token_ids[:1]
    assert output.reused_store_tokens == 69


@pytest.mark.planted("blocks-passed-by-window", "transfer", "refused")
def test_what_a_window_gave_up_is_not_handed_out(model_of, open_one, answer_of):
    # As it generates, the prefill's window moves on from the block that the reader needs.
    prefill = open_one("prefill", model_of("gemma3"))
    decode = open_one("decode", model_of("gemma3"), transfer={"claim_timeout_s": 0.3})
    prompt = prompt_of(71)
    here, there = hands_out(address_of(prefill), "window")
    many = ANSWER.model_copy(update={"max_tokens": 30})
    (first,) = prefill.generate([prompt], many, kv_transfer_params=here)
    assert first.kv_transfer_params == {"engine": node_of(prefill).engine_id, "tokens": 0}
    (output,) = decode.generate([prompt], ANSWER, kv_transfer_params=there)
    assert list(output.output_token_ids) == answer_of(prompt, "gemma3")
    assert output.reused_store_tokens == 0
    leaks_nothing(prefill, decode)


def test_layers_are_fetched_while_later_ones_are_computed(open_one, answer_of, stop_at):
    prefill, decode = open_one("prefill", max_num_tokens=48), open_one("decode")
    prompt = prompt_of(100)
    here, there = hands_out(address_of(prefill), "streamed")
    gate = stop_at(3 + 2)  # behind the second layer of the second chunk, of three layers each
    handle = decode.submit(prompt, ANSWER, kv_transfer_params=there)
    until(lambda: is_claimed(prefill))
    prefill.submit(prompt, PREFILL, kv_transfer_params=here)
    assert gate.reached.wait(60)
    # All layers of the first chunk, two of the second.
    whole = decode.layout.block_nbytes
    expected = 3 * whole + 3 * (whole // 3) * 2
    until(lambda: nbytes_read(decode) == expected)
    gate.open()
    assert result_of(handle) == (answer_of(prompt), 99)
    leaks_nothing(prefill, decode)


def test_what_was_read_counts_once_the_blocks_are_sure_to_stay(open_one, answer_of, stop_at):
    # Until then a preemption could take them, and a reader goes by its own clock.
    prefill, decode = open_one("prefill", max_num_tokens=48), open_one("decode")
    prompt = prompt_of(100)
    here, there = hands_out(address_of(prefill), "last")
    gate = stop_at(9)  # the last layer of the last of three chunks
    handle = decode.submit(prompt, ANSWER, kv_transfer_params=there)
    until(lambda: is_claimed(prefill))
    prefill.submit(prompt, PREFILL, kv_transfer_params=here)
    assert gate.reached.wait(60)
    until(lambda: nbytes_read(decode) == 7 * decode.layout.block_nbytes)  # of one still there
    gate.open()
    assert result_of(handle) == (answer_of(prompt), 99)
    leaks_nothing(prefill, decode)
