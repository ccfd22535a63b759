"""A prompt, one engine's life with it, and whether what it stored is right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from bench_engine import DIGEST, T
from stores import DictStore
from window_engine import Layouts, WindowEngine, llm_args, plain_run

from kvconnect import frame
from kvconnect.keys import BlockKey, Namespace, chain_key, root_key, store_key

PROMPT = list(range(1, 10 * T + 3))  # ten blocks and two tokens
GENERATE = 3


def run(
    store: object,
    layouts: Layouts,
    prompt: list[int] = PROMPT,
    max_tokens: int = GENERATE,
    chunk: int = 1000,
    **settings,
) -> tuple[list[int], int]:
    """One engine's life: the answer, and how many prompt tokens came from the store."""
    with WindowEngine(llm_args(store, layouts, **settings), chunk=chunk) as bench:
        answer = bench.answer(prompt, max_tokens)
        request_id = next(iter(bench.requests))
        assert bench.kv.all_free()
        assert not bench.manager.has_pending()
        return answer, bench.store_tokens[request_id]


def keys_of(prompt: Sequence[int], layouts: Layouts) -> list[BlockKey]:
    """Chained keys of the full blocks."""
    tokens = np.array(prompt, np.int32)
    key, keys = root_key(DIGEST, layouts, Namespace()), []
    for end in range(T, len(tokens) + 1, T):
        key = chain_key(key, tokens[end - T : end])
        keys.append(key)
    return keys


def is_sound(store: DictStore, prompt: Sequence[int], layouts: Layouts) -> bool:
    """Whether every stored block of `prompt` holds what computing it gives."""
    request, kv = plain_run(prompt, layouts)
    for group, one in enumerate(layouts):
        for number, key in enumerate(keys_of(prompt, layouts)):
            stored = store.frames.get(store_key(key, group))
            if stored is not None:
                right = kv.pools[group][kv.held[request.request_id][group][number]]
                found = frame.payload(stored, one.block_nbytes).clone().view(one.dtype)
                if not torch.equal(found, right.reshape(-1)):
                    return False
    return True
