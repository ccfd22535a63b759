"""Engines that share what they computed, peer to peer: the same tokens, fewer computed."""

from __future__ import annotations

import time
from pathlib import Path

from harness import PARAMS, PROMPT, T, open_llm

from kvconnect.backends import open_backend
from kvconnect.backends.nixl.store import NixlBackend

FULL = len(PROMPT) // T * T


def test_what_one_engine_computed_another_loads(model: Path, expected: list[int]) -> None:
    store = open_backend("nixl://?transport=tcp").inner
    assert isinstance(store, NixlBackend)
    with open_llm(model, store) as far:
        assert list(far.generate([PROMPT], PARAMS)[0].output_token_ids) == expected
        end = time.monotonic() + 60
        while len(store._parts.blocks) < FULL // T:
            assert time.monotonic() < end, "it was not saved"
            time.sleep(0.01)
        url = f"nixl://{store.address}?transport=tcp&patience=60s&verify=full"
        with open_llm(model, url) as near:
            output = near.generate([PROMPT], PARAMS)[0]
            assert list(output.output_token_ids) == expected
            assert output.reused_store_tokens >= FULL
            assert output.computed_tokens <= len(PROMPT) - FULL
    # Alone again: what the other had is gone with it, and is computed.
    with open_llm(model, url) as near:
        output = near.generate([PROMPT], PARAMS)[0]
        assert list(output.output_token_ids) == expected
        assert output.reused_store_tokens == 0
