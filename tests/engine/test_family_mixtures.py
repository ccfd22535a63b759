"""Requests of very different lengths, in a cache too small for all: of families that differ in how.

Some have drafts, some are preempted, prefixes are reused inside blocks and from the host tier.
"""

from __future__ import annotations

import pytest
import torch
from beside import PROMPTS, STORMY, Beside, Storm, T, connector, words
from families import computed_in
from late_store import LateStore
from observed import check_idle, preempt, tokens
from parrot import EAGER, Parrot, draft_with

from kvconnect import KvCacheConfig, SamplingParams
from kvconnect.backends.guard.breaker import Breaker

# An index; padded batches; a window by the mask.
MORE = {
    "bloom": {},
    "deepseek_v32": {"index_topk": 8},
    "falcon": {"alibi": True},
    "hy_v4": {"index_topk": 8},
    "phimoe": {"sliding_window": 5},
    "qwen4_exp_text": {"indexer_budget": 8},
    "xglm": {},
    "xlstm": {},
}
QUICK = {"bloom", "deepseek_v32"}
ALL = [one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in MORE]
LONG = words(130, 5)
LENGTHS = (130, 61, 7, 8, 9, 1, 17)
MIXED = [*(LONG[:length] for length in LENGTHS), words(33, 6), [*LONG[:40], 9, 9, 9], words(64, 7)]


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("size", [2, pytest.param(16, marks=pytest.mark.slow)])
def test_lengths_drafts_and_preemption(size, family, tiny, open_llm, reference):
    with computed_in(torch.float64, family):
        model = tiny(family, **MORE[family])
        expected = reference(model, MIXED, 8)
        cache = KvCacheConfig(
            tokens_per_block=size, max_tokens=240, host_cache_size=1 << 20, state_interval=16
        )
        llm = open_llm(
            model,
            kv_cache=cache,
            max_num_tokens=17,
            scheduling="max_utilization",
            speculative=EAGER,
        )
        known = [one + answer for one, answer in zip(MIXED, expected, strict=True)]
        draft_with(llm, Parrot(known[::2], 3, pause=13))
        sent = preempt(llm, lambda request: request.num_generated_tokens in {2, 5})
        for _ in range(2):
            counts = [8 - number % 4 for number in range(len(MIXED))]
            params = [SamplingParams(max_tokens=count) for count in counts]
            wanted = [one[:count] for one, count in zip(expected, counts, strict=True)]
            assert tokens(llm.generate(MIXED, params)) == wanted
        assert sent
        check_idle(llm)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORMY)
@pytest.mark.parametrize("family", ["bloom", "deepseek_v32", "hy_v4", "phimoe"])
def test_whatever_happens_beside_loads(family, kind, tiny, open_llm, reference, monkeypatch):
    monkeypatch.setattr(Breaker, "open", lambda *_: None)  # the store is asked all the time
    model, saved, store = tiny(family, **MORE[family]), LateStore(), LateStore()
    expected = dict(enumerate(reference(model, PROMPTS, 12)))
    with open_llm(model, connector=connector(saved), tokens_per_block=T) as llm:
        for prompt in PROMPTS:
            llm.generate(prompt, SamplingParams(max_tokens=1))
    store.become(saved)
    how = {"tokens_per_block": T, "max_tokens": 34 * T} | STORMY[kind]
    storm = Storm(open_llm(model, connector=connector(store), **how), store, Beside(monkeypatch))
    for seed in range(12):
        storm.run(seed, saved, expected)
    store.release()
