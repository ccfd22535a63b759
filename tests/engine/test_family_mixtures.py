"""Requests of very different lengths, in a cache too small for all: of families that differ in how.

Some have drafts, some are preempted, prefixes are reused inside blocks and from the host tier.
"""

from __future__ import annotations

import pytest
import torch
from families import computed_in
from observed import check_idle, preempt, slow, tokens, words
from parrot import EAGER, Parrot, draft_with

from kvconnect import KvCacheConfig, SamplingParams

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
QUICK = ["bloom", "deepseek_v32"]
ALL = [*QUICK, *slow(*(one for one in MORE if one not in QUICK))]
LONG = words(130, 5)
LENGTHS = (130, 61, 7, 8, 9, 1, 17)
MIXED = [*(LONG[:length] for length in LENGTHS), words(33, 6), [*LONG[:40], 9, 9, 9], words(64, 7)]


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("size", [2, *slow(16)])
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
