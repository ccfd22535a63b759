"""Random prompts of recurrent models from prefill to decode; both may draft, store and preempt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engines import PREFILL, address_of, hands_out, held_by, leaks_nothing, open_engine, until
from families import write_tiny
from free_ports import free_ports
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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "bamba"])
@pytest.mark.parametrize(("ours", "theirs"), [(2, 2), (1, 2), (2, 1)])
def test_ranks_hand_out_states_until_they_are_killed(ours, theirs, family, start_one, tmp_path):
    """Each engine is in processes of its own, one for each rank."""
    rng = np.random.default_rng([ours, theirs])
    model = write_tiny(tmp_path / "model", family)
    listen = f"127.0.0.1:{free_ports(theirs)}"
    prefill = start_one(
        "prefill",
        model,
        tensor_parallel_size=theirs,
        max_num_tokens=24,
        transfer={"listen": listen},
    )
    decode = start_one("decode", model, tensor_parallel_size=ours, max_num_tokens=24)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    known: list[list[int]] = [[]]
    fetched = 0

    def carried(number: str) -> tuple[dict[str, Any], dict[str, Any]]:
        here, there = hands_out(prefill.address, number)
        return here, there | {"tp_size": theirs}

    with open_engine(model, None) as fresh:
        for turn in range(6):
            stems = [known[rng.integers(len(known))] for _ in range(3)]
            prompts = [
                [*stem[: rng.integers(len(stem) + 1)], *rng.integers(3, 9, rng.integers(1, 40))]
                for stem in stems
            ]
            prompts = [list(map(int, one[-90:])) for one in prompts]
            expected = tokens(fresh.generate(prompts, params))
            for number, prompt in enumerate(prompts):
                here, there = carried(f"{turn}-{number}")
                if turn % 2:  # read while it is computed
                    decode.ask("submit", prompt, params, there)
                    prefill.ask("submit", prompt, PREFILL, here)
                else:
                    prefill.ask("submit", prompt, PREFILL, {"do": "prefill"})
                    _, _, there = prefill.ask("result")
                    decode.ask("submit", prompt, params, there)
            for answer in expected:
                found, reused, _ = decode.ask("result")
                assert found == answer
                fetched += reused
                if turn % 2:
                    prefill.ask("result")
            known += [[*one, *more] for one, more in zip(prompts, expected, strict=True)]
        last = list(map(int, rng.integers(9, 12, 100)))  # no prefix of it is known
        (answer,) = tokens(fresh.generate([last], params))
    assert fetched > 0
    for process in (prefill, decode):
        until(lambda one=process: one.ask("held").keys() <= {"users of links"})

    here, there = carried("killed")
    prefill.ask("stop_at", 3)  # within the second chunk
    decode.ask("submit", last, params, there)
    prefill.ask("submit", last, PREFILL, here)
    assert prefill.ask("wait_stopped")
    prefill.end()
    assert decode.ask("result")[:2] == (answer, 0)
    until(lambda: decode.ask("held").keys() <= {"users of links"})
    decode.end_well()
