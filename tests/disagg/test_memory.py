"""The memory of engines that handed prompts to each other."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
from engines import T, hand_over, open_engine, prompt_of

from kvconnect import LLM


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def pools_of(llm: LLM) -> list[weakref.ref]:
    """Returns references to the pools, and to the memory that fetched blocks land in."""
    memory = llm._engine._connector._worker._node._landing
    landing = [] if memory is None else [memory._memory]
    return [weakref.ref(one) for one in (*llm._kv._memory.pools, *landing)]


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("both", "both")])
@pytest.mark.usefixtures("no_collection")
def test_closed_engines_free_their_pools_at_once(llama, roles):
    prefill, decode = (open_engine(llama, role) for role in roles)
    _, fetched = hand_over(prefill, decode, prompt_of(4 * T))
    assert fetched
    kept = pools_of(prefill) + pools_of(decode)
    prefill.close()
    decode.close()
    del prefill, decode
    assert [one() for one in kept] == [None] * len(kept)
