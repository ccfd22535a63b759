"""Measures what explaining a prompt costs, beside what its blocks cost otherwise."""

from __future__ import annotations

import time

import numpy as np

from kvconnect.engine.explainer import Explainer
from kvconnect.keys import BlockKey
from kvconnect.request import LlmRequest, ScheduledBatch

T = 16
ROUNDS = 7


class NothingCached:
    """A cache manager that has nothing."""

    def nearest_cached(self, request: LlmRequest) -> None:
        return None


def seconds(num_blocks: int) -> float:
    """The least time for one prompt of so many blocks."""
    rng = np.random.default_rng(0)
    explainer = Explainer(NothingCached())  # type: ignore[arg-type]
    best = float("inf")
    for _ in range(ROUNDS):
        requests = [
            LlmRequest(
                number,
                rng.integers(0, 50_000, num_blocks * T + 5).astype(np.int32),
                chain_root=BlockKey(bytes(32)),
                tokens_per_block=T,
            )
            for number in range(max(2, 2000 // num_blocks))
        ]
        started = time.perf_counter()
        for request in requests:
            explainer.admitted(ScheduledBatch([request]))
            request.num_scheduled_tokens = request.num_tokens
            explainer.computed(request)
            request.num_computed_tokens = request.num_tokens
            explainer.ended(request)
            request.account.explanation()
        best = min(best, (time.perf_counter() - started) / len(requests))
    return best


if __name__ == "__main__":
    for num_blocks in (4, 16, 64, 256, 1024, 8192):
        took = seconds(num_blocks)
        print(f"{num_blocks} blocks: {1e6 * took:.0f} us, {1e6 * took / num_blocks:.2f} us a block")
