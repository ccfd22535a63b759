"""A store beside the transfer: what is not fetched comes from it, what is fetched goes to it."""

from __future__ import annotations

from engines import ANSWER, PREFILL, hand_over, leaks_nothing, prompt_of

PROMPT = prompt_of(100)


def store(directory):
    url = f"disk://{directory}?capacity=32MiB"
    return {"connector": {"url": url, "lookup_timeout_ms": 60_000, "overlap_loads": False}}


def test_what_was_fetched_is_saved_by_the_reader(open_one, answer_of, tmp_path):
    prefill = open_one("prefill")
    with open_one("decode", **store(tmp_path)) as decode:
        assert hand_over(prefill, decode, PROMPT)[1] == 99
    again = open_one("both", **store(tmp_path))
    (output,) = again.generate([PROMPT], ANSWER)
    assert list(output.output_token_ids) == answer_of(PROMPT)
    assert output.reused_store_tokens == 99
    leaks_nothing(prefill, again)


def test_a_prompt_from_the_store_is_handed_out(open_one, answer_of, tmp_path):
    with open_one("prefill", **store(tmp_path)) as earlier:
        earlier.generate([PROMPT[:80]], PREFILL)
    prefill, decode = open_one("prefill", **store(tmp_path)), open_one("decode")
    (first,) = prefill.generate([PROMPT], PREFILL, kv_transfer_params={"do": "prefill"})
    assert first.reused_store_tokens == 80
    (output,) = decode.generate([PROMPT], ANSWER, kv_transfer_params=first.kv_transfer_params)
    assert list(output.output_token_ids) == answer_of(PROMPT)
    assert output.reused_store_tokens == 99
    leaks_nothing(prefill, decode)


def test_a_prompt_that_the_device_lost_is_handed_out(open_one, answer_of):
    prefill = open_one(
        "prefill",
        max_tokens=160,
        connector={"url": "memory:?capacity=32MiB", "overlap_loads": False},
    )
    decode = open_one("decode")
    prefill.generate([PROMPT], PREFILL)
    prefill.generate([prompt_of(140, seed) for seed in range(2)], PREFILL)
    (first,) = prefill.generate([PROMPT], PREFILL, kv_transfer_params={"do": "prefill"})
    assert first.reused_store_tokens
    (output,) = decode.generate([PROMPT], ANSWER, kv_transfer_params=first.kv_transfer_params)
    assert list(output.output_token_ids) == answer_of(PROMPT)
    assert output.reused_store_tokens == 99
    leaks_nothing(prefill, decode)


def test_what_cannot_be_fetched_comes_from_the_store(open_one, answer_of, tmp_path):
    with open_one("both", **store(tmp_path)) as earlier:
        earlier.generate([PROMPT], PREFILL)
    decode = open_one("decode", **store(tmp_path))
    there = {"transfer_id": "x", "address": "127.0.0.1:9", "tokens": 200}
    (output,) = decode.generate([PROMPT], ANSWER, kv_transfer_params=there)
    assert list(output.output_token_ids) == answer_of(PROMPT)
    assert output.reused_store_tokens == 99
