"""Token for token what transformers answers with a cache of its own, in float64."""

from __future__ import annotations

import threading
from itertools import product

import pytest
from observed import slow, tokens

from kvconnect import LLM, KvCacheConfig, SamplingParams

ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "deepseek_v3"]
# Full attention, windows in some layers, keys and values of different sizes.
KINDS = ["llama", "gemma3", "deepseek_v3"]
MORE = ["mixtral", "phi", "gpt_neox", "opt"]
LESS_OFTEN = ["qwen2", "gemma", "olmo"]
GREEDY = SamplingParams(max_tokens=20)


BY_KIND = [*KINDS, *slow("qwen3", "mistral", "gpt2")]


@pytest.fixture
def model(arch, model_of):
    return model_of(arch)


@pytest.mark.parametrize("arch", BY_KIND)
def test_one_after_the_other_cold(model, open_llm, reference, prompts):
    config = KvCacheConfig(tokens_per_block=16, max_tokens=1024, enable_block_reuse=False)
    llm = open_llm(model, kv_cache=config)
    outputs = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert tokens(outputs) == reference(model, prompts, 20)
    assert all(output.computed_tokens == output.prompt_tokens for output in outputs)


@pytest.mark.parametrize(
    ("arch", "max_num_tokens"), [*((arch, 7) for arch in ARCHITECTURES), ("llama", 16)]
)
def test_prompts_in_chunks(model, max_num_tokens, open_llm, reference, prompts):
    llm = open_llm(model, max_num_tokens=max_num_tokens)
    assert tokens(llm.generate(prompts, GREEDY)) == reference(model, prompts, 20)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_at_once_cold_then_reused_from_the_device(model, open_llm, reference, prompts):
    llm = open_llm(model)
    assert tokens(llm.generate(prompts, GREEDY)) == reference(model, prompts, 20)
    again = llm.generate(prompts, GREEDY)
    assert tokens(again) == reference(model, prompts, 20)
    assert [output.reused_device_tokens for output in again] == [len(p) - 1 for p in prompts]
    assert {output.computed_tokens for output in again} == {1}


@pytest.mark.parametrize("arch", BY_KIND)
def test_a_conversation_that_goes_on_reuses_the_answer_too(model, open_llm, reference, prompts):
    llm = open_llm(model)
    prompt = prompts[1]
    for _ in range(3):
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
        # The last token was sampled but never fed back: everything before it is there.
        known = len(prompt) + len(output.output_token_ids) - 1
        prompt = [*prompt, *output.output_token_ids, 65, 66, 67]
        (output,) = llm.generate(prompt, GREEDY)
        assert tokens([output]) == reference(model, [prompt], 20)
        assert output.reused_device_tokens == known


@pytest.mark.parametrize(
    ("arch", "tokens_per_block"),
    [
        *[("llama", 64), ("gemma3", 2), ("deepseek_v3", 2)],
        *slow(*product(ARCHITECTURES, (2, 64))),
    ],
)
def test_small_and_large_blocks(model, tokens_per_block, open_llm, reference, prompts):
    llm = open_llm(model, tokens_per_block=tokens_per_block, max_num_tokens=40)
    for _ in range(2):
        assert tokens(llm.generate(prompts, GREEDY)) == reference(model, prompts, 20)


def test_from_several_threads(model_of, open_llm, reference, prompts):
    llm = open_llm(model_of("llama"), max_num_tokens=64)
    answers: list[list[list[int]]] = []

    def ask() -> None:
        answers.append(tokens(llm.generate(prompts, GREEDY)))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [reference(model_of("llama"), prompts, 20)] * 4


@pytest.mark.parametrize("arch", [*MORE, *slow(*LESS_OFTEN)])
def test_other_architectures(arch, model_of, open_llm, reference, prompts):
    llm = open_llm(model_of(arch), max_num_tokens=48)
    for _ in range(2):
        assert tokens(llm.generate(prompts, GREEDY)) == reference(model_of(arch), prompts, 20)


@pytest.mark.parametrize("arch", ["llama", *slow(*ARCHITECTURES[1:])])
def test_after_a_restart(model, open_llm, reference, prompts, tmp_path):
    connector = f"disk://{tmp_path}/kv?capacity=32MiB"
    with open_llm(model, connector=connector) as llm:
        llm.generate(prompts, GREEDY)
    llm = open_llm(model, connector=connector)
    # All of them but their last tokens comes from the store, and the answers are right.
    outputs = [llm.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert tokens(outputs) == reference(model, prompts, 20)
    assert all(output.computed_tokens == 1 for output in outputs)
    assert sum(output.reused_store_tokens for output in outputs) > 200


def test_the_engine_needs_no_context_manager(llama, reference, prompts):
    llm = LLM(llama, kv_cache=KvCacheConfig(max_tokens=1024), dtype="float64")
    try:
        assert tokens(llm.generate(prompts[:2], GREEDY)) == reference(llama, prompts[:2], 20)
    finally:
        llm.close()
        llm.close()
