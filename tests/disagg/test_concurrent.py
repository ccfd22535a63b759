"""Many prompts at once from one engine to another, some of them aborted on either side."""

from __future__ import annotations

import random

import pytest
from engines import ANSWER, PREFILL, address_of, hands_out, held_by, prompt_of, until

SEVERAL = 64


@pytest.mark.parametrize(
    "arch",
    ["gemma3", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("llama", "deepseek_v3"))],
)
def test_64_at_once_with_aborts(arch, model_of, open_one, answer_of, counted):
    """Of a pool for 20 of them; those that a window belongs to give up blocks as they go."""
    chance = random.Random(3)
    # Of a reader that was aborted before it was heard of, the blocks are kept for a lease.
    prefill = open_one("prefill", model_of(arch), max_num_tokens=96, transfer={"lease_s": 1.0})
    decode = open_one("decode", model_of(arch))
    address = address_of(prefill)
    prompts = [prompt_of(length, seed=1) for length in (17, 39, 71, 100)]
    answers = [answer_of(prompt, arch) for prompt in prompts]
    handles, computing = [], []
    for number in range(SEVERAL):
        kind = number % len(prompts)
        here, there = hands_out(address, f"{arch}-{number}")
        options = {"cache_salt": f"tenant {number}"}  # each is fetched by itself
        handle = decode.submit(prompts[kind], ANSWER, kv_transfer_params=there, **options)
        handles.append((answers[kind], handle))
        computing.append(prefill.submit(prompts[kind], PREFILL, kv_transfer_params=here, **options))
    for number in range(0, SEVERAL, 4):
        # Whatever each is doing by now.
        until(lambda number=number: sum(one.done for one in computing) >= number // 2)
        chance.choice([handles[number + 1][1], computing[number + 2]]).abort()
    aborted = 0
    for answer, handle in handles:
        output = handle.result(60)
        tokens = list(output.output_token_ids)
        assert tokens == (answer[: len(tokens)] if output.finish_reason == "abort" else answer)
        aborted += output.finish_reason == "abort"
    for one in computing:
        one.result(60)
    assert counted["transfer.fetched"] > SEVERAL // 2
    assert aborted
    until(lambda: not held_by(prefill) and not held_by(decode))
