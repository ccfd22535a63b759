"""The output depends on the cache: otherwise no test of equality would show anything."""

from __future__ import annotations

import pytest
import torch
from observed import tokens

from kvconnect import SamplingParams
from kvconnect.request import RequestState

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize(
    ("arch", "layer"),
    [
        *((arch, 2) for arch in ("llama", "qwen3", "mistral", "gemma3", "gpt2", "deepseek_v3")),
        *[("llama", 0), ("gemma3", 0)],
    ],
)
def test_bytes_flipped_in_the_pool_change_the_output(arch, layer, model_of, open_llm, prompts):
    llm = open_llm(model_of(arch))
    prompt = prompts[1]
    before = llm.generate(prompt, GREEDY)[0]
    buffers = llm._engine._kv.get_buffers(layer)
    for memory in buffers if isinstance(buffers, tuple) else (buffers,):
        memory.view(torch.uint8).bitwise_xor_(0x15)
    after = llm.generate(prompt, GREEDY)[0]
    assert after.reused_device_tokens == len(prompt) - 1
    assert after.output_token_ids != before.output_token_ids


def test_one_block_in_place_of_another_changes_the_output(llama, open_llm, prompts):
    llm = open_llm(llama)
    prompt = prompts[4]
    before = llm.generate(prompt, GREEDY)[0]
    pool = llm._engine._kv.pool_tensor()
    first, second, *_ = [block for block in range(64) if pool[block].abs().sum() > 0]
    pool[first] = pool[second]  # swapping them would change nothing: attention is a sum
    assert llm.generate(prompt, GREEDY)[0].output_token_ids != before.output_token_ids


def test_what_was_left_in_a_block_never_shows(llama, open_llm, reference, prompts):
    """Memory of other requests, even of bytes that are no numbers, must not be seen."""
    llm = open_llm(llama, max_tokens=4096)
    llm._engine._kv.pool_tensor().fill_(torch.nan)
    # The second time, parts of blocks are copied into blocks that were never used.
    for _ in range(2):
        outputs = llm.generate(prompts, SamplingParams(max_tokens=20))
        assert tokens(outputs) == reference(llama, prompts, 20)


def test_what_a_partial_copy_brings_along_never_shows(llama, open_llm, reference, prompts):
    """Nothing is promised about the tokens of a reused block behind those that matched."""
    llm = open_llm(llama)
    kv = llm._engine._kv
    prepare = kv.prepare_resources

    def prepare_and_spoil(batch):
        fresh = [r for r in batch.context_requests if r.state is RequestState.QUEUED]
        prepare(batch)
        for request in fresh:
            block = kv.get_batch_cache_indices([request])[request.request_id]
            number, valid = divmod(request.num_computed_tokens, 16)
            for layer in range(3):
                kv.get_buffers(layer)[block[number], :, valid:] = torch.nan

    kv.prepare_resources = prepare_and_spoil
    for _ in range(2):
        outputs = llm.generate(prompts, SamplingParams(max_tokens=20))
        assert tokens(outputs) == reference(llama, prompts, 20)
    assert any(one.reused_device_tokens % 16 for one in outputs)


def test_unused_slots_of_a_block_are_zero(llama, open_llm):
    """What is saved of a partly filled block holds nothing of another tenant."""
    llm = open_llm(llama, max_tokens=64)
    llm._engine._kv.pool_tensor().fill_(7.0)
    llm.generate([5] * 20, SamplingParams(max_tokens=3, ignore_eos=True))
    keys = llm._engine._kv.get_buffers(0)[:, 0]
    used = [block for block in range(4) if not (keys[block] == 7.0).all()]
    filled = sorted(int((keys[block].abs().sum((1, 2)) > 0).sum()) for block in used)
    assert filled == [6, 16]  # 22 tokens were fed: 20 of the prompt and the first two sampled
