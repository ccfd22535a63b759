"""Windows, host tier, reuse, preemption and drafts together, with the real cache manager."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from observed import check_idle, slow, tokens

from kvconnect import KvCacheConfig, SamplingParams
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.engine.sampling.drafts import NgramSpeculation
from kvconnect.errors import UsageError

GREEDY = SamplingParams(max_tokens=28)
DRAFTS = NgramSpeculation(num_draft_tokens=5, min_ngram_size=1)


@pytest.fixture
def model(arch, model_of, mixed):
    return mixed if arch == "mixed" else model_of(arch)


@pytest.mark.parametrize(
    ("arch", "max_num_tokens", "tokens_per_block"),
    [
        *[("mistral", 13, 16), ("mixed", 2048, 4)],
        *slow(("mixed", 13, 16)),
        *slow(("mistral", 2048, 4)),
    ],
)
def test_cold_and_reused(model, max_num_tokens, tokens_per_block, open_llm, reference, prompts):
    llm = open_llm(model, max_num_tokens=max_num_tokens, tokens_per_block=tokens_per_block)
    expected = reference(model, prompts, 28)
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY)
        assert tokens(outputs) == expected
    assert [output.reused_device_tokens for output in outputs] == [len(p) - 1 for p in prompts]
    check_idle(llm)


def test_layers_of_one_window_share_a_pool(mixed, open_llm):
    layouts = open_llm(mixed).layouts
    assert [(one.window, one.layers) for one in layouts] == [(None, (2, 5)), (24, (0, 1, 3, 4))]


def test_a_page_that_was_given_up_too_early_is_an_error_not_an_answer(mixed, open_llm):
    class Hasty(KVCacheManager):
        def get_group_cache_indices(self, requests, group):
            tables = super().get_group_cache_indices(requests, group)
            return {one: [-1, *table[1:]] for one, table in tables.items()}

    llm = open_llm(mixed, kv_cache_manager=Hasty)
    with pytest.raises(UsageError, match="the cache manager does not hold them"):
        llm.generate([[1] * 20], GREEDY)


def test_a_window_group_gives_up_what_it_cannot_reach(mixed, open_llm):
    llm = open_llm(mixed, max_num_tokens=16, tokens_per_block=4)
    engine, held = llm._engine, []
    update = engine._kv.update_resources

    def watched(batch):
        update(batch)
        tables = engine._kv.get_group_cache_indices(batch.requests, 1)
        held.extend(sum(block >= 0 for block in table) for table in tables.values())

    engine._kv.update_resources = watched
    llm.generate([[1, 2, 3] * 60], SamplingParams(max_tokens=60, ignore_eos=True))
    assert max(held) <= (24 - 1 + 16) // 4 + 1
    check_idle(llm)


def test_a_long_prompt_fits_a_window_pool_that_holds_a_chunk_and_a_window(
    mixed, open_llm, reference
):
    class Tight(KVCacheManager):
        def __init__(self, config, layouts, device):
            super().__init__(config, layouts, device, num_blocks={None: 64, 24: 11})

    prompt = list(range(200))
    llm = open_llm(mixed, kv_cache_manager=Tight, max_num_tokens=16, tokens_per_block=4)
    assert tokens(llm.generate([prompt] * 2, GREEDY)) == reference(mixed, [prompt] * 2, 28)
    assert llm.stats().preemptions == 0


def test_nothing_is_read_that_nobody_holds(mixed, open_llm, reference, prompts):
    class Spiteful(KVCacheManager):
        """Overwrites what no live request holds, after every step."""

        def __init__(self, config, layouts, device):
            super().__init__(config, layouts, device, num_blocks={None: 128, 24: 96})
            self.live = {}

        def prepare_resources(self, batch):
            super().prepare_resources(batch)
            self.live |= {one.request_id: one for one in batch.requests}

        def update_resources(self, batch):
            super().update_resources(batch)
            held = [one for one in self.live.values() if self.blocks.holds(one.request_id)]
            for group in range(len(self.layouts)):
                pool = self.pool_tensor(group)
                unused = set(range(len(pool)))
                for table in self.get_group_cache_indices(held, group).values():
                    unused -= set(table)
                pool[sorted(unused)] = torch.nan

    config = KvCacheConfig(tokens_per_block=8, enable_block_reuse=False)
    llm = open_llm(mixed, kv_cache=config, kv_cache_manager=Spiteful, max_num_tokens=40)
    assert tokens(llm.generate(prompts, GREEDY)) == reference(mixed, prompts, 28)


@pytest.mark.parametrize("arch", ["mixed", *slow("mistral")])
def test_preempted_with_drafts(model, open_llm, reference, prompts):
    llm = open_llm(
        model,
        tokens_per_block=8,
        max_tokens=192,
        max_num_tokens=32,
        scheduling="max_utilization",
        speculative=DRAFTS,
    )
    several = prompts * 2
    assert tokens(llm.generate(several, GREEDY)) == reference(model, several, 28)
    stats = llm.stats()
    assert stats.preemptions > 0
    assert stats.drafted_tokens > 0
    check_idle(llm)


@pytest.mark.parametrize("arch", ["llama", "mixed"])
def test_what_left_the_device_comes_back_from_the_host(model, open_llm, reference):
    rng = np.random.default_rng(3)
    several = [rng.integers(0, 256, 100).tolist() for _ in range(4)]
    config = KvCacheConfig(tokens_per_block=8, max_tokens=160, host_cache_size=64 << 20)
    llm = open_llm(model, kv_cache=config)
    expected = reference(model, several, 10)
    params = SamplingParams(max_tokens=10)
    for _ in range(2):
        outputs = [llm.generate(prompt, params)[0] for prompt in several]
        assert tokens(outputs) == expected
    # 160 tokens are on the device; without the host tier the first ones would be gone.
    assert [output.reused_device_tokens for output in outputs] == [99] * 4
    assert outputs[0].reused_host_tokens >= 64
    assert llm.stats().reused_host_tokens == sum(one.reused_host_tokens for one in outputs)
    check_idle(llm)
