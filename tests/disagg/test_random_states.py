"""Random prompts of recurrent models from prefill to decode; both may draft, store and preempt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import address_of, hands_out, held_by, leaks_nothing, open_engine, until
from families import write_tiny
from observed import preempt, tokens
from parrot import EAGER, Parrot, draft_with

from kvconnect import LLM, SamplingParams


def preempted(llm: LLM, rng: np.random.Generator) -> None:
    """Sends requests back after some steps, each at most three times."""
    times: dict[int, int] = {}

    def when(request: Any) -> bool:
        number = times.get(request.request_id, 0)
        if number == 3 or rng.random() >= 0.1:
            return False
        times[request.request_id] = number + 1
        return True

    preempt(llm, when)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "mamba2", "minimax", "falcon"])
def test_answers_are_those_of_one_engine(family, seed, open_one, tmp_path):
    rng = np.random.default_rng(seed)

    def one_of(*these: Any) -> Any:
        return these[int(rng.integers(len(these)))]

    model = write_tiny(tmp_path / "model", family)
    size, engines = one_of(4, 16), []
    store = {"url": f"disk://{tmp_path}/kv?capacity=64MiB", "lookup_timeout_ms": 60_000}
    for role in ("prefill", "decode"):
        llm = open_one(
            role,
            model,
            tokens_per_block=size,
            max_tokens=one_of(256, 512, 1024),
            max_num_tokens=one_of(4, 13, 24, 64),
            max_batch_size=one_of(1, 2, 4),
            scheduling=one_of("guaranteed_no_evict", "max_utilization"),
            speculative=EAGER,
            connector=one_of({}, store),
        )
        engines.append(llm)
        if one_of(True, False):
            preempted(llm, rng)
    prefill, decode = engines
    known: list[list[int]] = [[]]
    fetched = 0
    with open_engine(model, None) as fresh:
        for turn in range(6):
            stems = [known[rng.integers(len(known))] for _ in range(3)]
            prompts = [
                [*stem[: rng.integers(len(stem) + 1)], *rng.integers(3, 6, rng.integers(1, 25))]
                for stem in stems
            ]
            prompts = [list(map(int, one[-90:])) for one in prompts]
            params = SamplingParams(max_tokens=int(rng.integers(1, 12)), ignore_eos=True)
            expected = tokens(fresh.generate(prompts, params))
            whole = [[*one, *more] for one, more in zip(prompts, expected, strict=True)]
            for llm in engines:
                draft_with(llm, Parrot(whole, one_of(0, 2, 3), count=one_of(1, 3, 20)))
            few = SamplingParams(max_tokens=one_of(0, 0, 1, 5), ignore_eos=True)
            handles = []
            for number, prompt in enumerate(prompts):
                here, there = hands_out(address_of(prefill), f"{turn}-{number}")
                if before := one_of(True, False):
                    (first,) = prefill.generate([prompt], few, kv_transfer_params={"do": "prefill"})
                    there = first.kv_transfer_params
                handles.append(decode.submit(prompt, params, kv_transfer_params=there))
                if not before:
                    prefill.submit(prompt, few, kv_transfer_params=here)
                    if one_of(True, False, False, False):
                        handles[-1].abort()
                        handles[-1] = None
            for handle, answer in zip(handles, expected, strict=True):
                if handle is not None:
                    output = handle.result(120)
                    assert list(output.output_token_ids) == answer
                    fetched += output.reused_store_tokens
            known += whole
            one_of(prefill, decode).reset_prefix_cache()
    assert fetched > 0
    leaks_nothing(prefill, decode)
    until(lambda: held_by(prefill).keys() | held_by(decode).keys() <= {"users of links"})
    for llm in engines:
        llm._engine._kv.blocks.check_invariants()
