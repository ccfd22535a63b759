"""Blocks of one engine are read into blocks of another size, and the answer is that of one."""

from __future__ import annotations

import pytest
from engines import ANSWER, PREFILL, address_of, hands_out, leaks_nothing, prompt_of

LENGTHS = (2, 17, 71, 100)
# What a window of 24 has given up before block 2 of 16 tokens, a block of 64 would have to hold.
COMPUTED = {("gemma3", 16): {71}}


@pytest.mark.parametrize(
    ("arch", "theirs", "ours"),
    [
        *(("llama", 16, 64), ("gemma3", 16, 64), ("deepseek_v3", 16, 64), ("llama", 64, 16)),
        pytest.param("gemma3", 64, 16, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 64, 16, marks=pytest.mark.slow),
    ],
)
def test_the_answer_is_that_of_one_engine(
    arch, theirs, ours, model_of, open_one, answer_of, counted
):
    prefill = open_one("prefill", model_of(arch), max_num_tokens=48, tokens_per_block=theirs)
    decode = open_one("decode", model_of(arch), tokens_per_block=ours)
    handles = []
    for length in LENGTHS:
        prompt = prompt_of(length)
        here, there = hands_out(address_of(prefill), f"{arch}-{length}")
        handles.append((prompt, decode.submit(prompt, ANSWER, kv_transfer_params=there)))
        prefill.submit(prompt, PREFILL, kv_transfer_params=here)
    for prompt, handle in handles:
        output = handle.result(60)  # sooner than claim_timeout_s: what cannot come is seen at once
        assert list(output.output_token_ids) == answer_of(prompt, arch)
        fetched = 0 if len(prompt) in COMPUTED.get((arch, theirs), ()) else len(prompt) - 1
        assert (output.reused_store_tokens, output.computed_tokens) == (
            fetched,
            len(prompt) - fetched,
        )
    computed = COMPUTED.get((arch, theirs), ())
    assert counted["transfer.computed_instead.tokens"] == sum(length - 1 for length in computed)
    leaks_nothing(prefill, decode)
