"""Preemption, aborts, resets: the connector follows vLLM's scheduler, and keeps nothing."""

from __future__ import annotations

import random
import time

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import inside
import vllm
from vllm_engine import BLOCK, Engine, connector, engine, prompts_of

from kvconnect.trace import metrics

pytestmark = pytest.mark.engines


@pytest.mark.parametrize("save_on", ["full", "finish"])
def test_preempted_requests_answer_the_same(start, llama, store, save_on):
    prompts = prompts_of(6 * BLOCK, 6 * BLOCK + 5, 6 * BLOCK + 9, 5 * BLOCK)
    with engine(llama, None) as plain:
        wanted = plain.tokens(prompts, 5 * BLOCK)
    transfer = connector(store, save_on=save_on)
    with start(llama, transfer, num_gpu_blocks_override=28, max_model_len=800) as made:
        made.inside(inside.count_preemptions)
        assert made.tokens(prompts, 5 * BLOCK) == wanted
        assert sum(made.inside(inside.num_preemptions))
        made.check_empty()
        made.flush()
        made.forget_device()
        again = made.answer(prompts, 5 * BLOCK)
    assert [one.tokens for one in again] == wanted
    assert all(one.cached for one in again)


def test_reset_of_the_connector_keeps_what_was_saved(start, llama, store):
    prompts = prompts_of(300, 200)
    with start(llama, connector(store)) as made:
        cold = made.answer(prompts)
        made.flush()
        assert made.llm.reset_prefix_cache(reset_connector=True)
        after = made.answer(prompts)
    assert [one.cached for one in after] == [288, 192]
    assert [one.tokens for one in after] == [one.tokens for one in cold]


def test_reset_while_requests_run(start, llama, store):
    prompts = prompts_of(300, 200)
    with start(llama, connector(store)) as made:
        wanted = made.tokens(prompts, 40)
        made.flush()
        made.forget_device()
        ids = submit(made, prompts, 40)
        for _ in range(8):
            made.llm.llm_engine.step()
        made.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert run(made, ids) == wanted
        made.check_empty()


def submit(made: Engine, prompts, num_tokens: int) -> list[str]:
    params = vllm.SamplingParams(
        max_tokens=num_tokens, temperature=0, detokenize=False, ignore_eos=True
    )
    ids = []
    for prompt in prompts:
        made._numbers += 1
        name = f"test-{made._numbers}"
        made.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        ids.append(name)
    return ids


def run(made: Engine, ids) -> list[list[int]]:
    """The tokens of requests; those that were aborted have none."""
    found: dict[str, list[int]] = {}
    until = time.monotonic() + 90
    while made.llm.llm_engine.has_unfinished_requests() and time.monotonic() < until:
        for output in made.llm.llm_engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
    return [found.get(name, []) for name in ids]


def test_many_at_once_with_aborts_leave_nothing_behind(start, llama, store):
    rng = random.Random(3)
    common = prompts_of(5 * BLOCK)[0]
    prompts = [
        common[: rng.randrange(20, 5 * BLOCK)] + prompts_of(rng.randrange(1, 200), seed=n)[0]
        for n in range(64)
    ]
    with start(llama, connector(store), num_gpu_blocks_override=200) as made:
        wanted = made.tokens(prompts, 12)
        made.flush()
        for _turn in range(2):
            made.forget_device()
            ids = submit(made, prompts, 12)
            found: dict[str, list[int]] = {}
            aborted = set()
            for _ in range(400):
                if not made.llm.llm_engine.has_unfinished_requests():
                    break
                for output in made.llm.llm_engine.step():
                    if output.finished:
                        found[output.request_id] = list(output.outputs[0].token_ids)
                if rng.random() < 0.5 and (left := [one for one in ids if one not in found]):
                    victim = rng.choice(left)
                    aborted.add(victim)
                    made.llm.llm_engine.abort_request([victim])
            for name, expected in zip(ids, wanted, strict=True):
                if name in found and name not in aborted:
                    assert found[name] == expected
            assert aborted
            made.check_empty()


@pytest.mark.parametrize("fault", ["hang", "late"])
def test_an_abort_during_a_load_gives_the_blocks_back(start, llama, tmp_path, fault):
    prompts = prompts_of(300, 260, 220)
    transfer = connector(f"faulty://background-abort{tmp_path}", load_timeout_s=2.0)
    with start(llama, transfer) as made:
        wanted = made.tokens(prompts)
        made.flush()
        made.forget_device()
        made.inside(inside.plant, "background-abort", fault, ["load"], 0.5)
        ids = submit(made, prompts, 4)
        until = time.monotonic() + 60
        while not sum(made.inside(inside.num_loading)):
            made.advance()
            assert time.monotonic() < until
        made.llm.llm_engine.abort_request(ids)
        made.check_empty()
        made.inside(inside.heal, "background-abort")
        made.forget_device()
        assert made.tokens(prompts) == wanted


def test_what_is_counted_can_be_seen(llama, store, monkeypatch):
    from kvconnect.integrations.vllm.connector import KvConnect

    told = []
    get_stats = KvConnect.get_kv_connector_stats

    def noted(self):
        told.append(get_stats(self))
        return told[-1]

    monkeypatch.setattr(KvConnect, "get_kv_connector_stats", noted)
    before = metrics.snapshot().get("store.save.saved", 0)
    with engine(llama, connector(store)) as made:
        made.connector.get_kv_connector_stats()  # what other tests counted
        told.clear()
        made.answer(prompts_of(200))
        made.flush()
        made.connector.get_kv_connector_stats()
    assert metrics.snapshot()["store.save.saved"] - before == 6
    assert len(told) > 1, "vLLM never asked"
    stats = KvConnect.build_kv_connector_stats()
    for one in told:
        assert one is None or not one.is_empty()
        stats = stats if one is None else stats.aggregate(one)
    assert stats.data["store_saved_blocks"] == 6
    assert stats.reduce()["store saved blocks"] == 6
