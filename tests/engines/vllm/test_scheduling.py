"""Many requests with aborts: the connector follows vLLM's scheduler, and keeps nothing."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

from vllm_engine import BLOCK, connector, engine, prompts_of

from kvconnect.trace import metrics

pytestmark = pytest.mark.engines


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
            ids = made.submit(prompts, 12)
            found: dict[str, list[int]] = {}
            aborted = set()
            for _ in range(400):
                if not made.llm.llm_engine.has_unfinished_requests():
                    break
                made.step(found)
                if rng.random() < 0.5 and (left := [one for one in ids if one not in found]):
                    victim = rng.choice(left)
                    aborted.add(victim)
                    made.llm.llm_engine.abort_request([victim])
            for name, expected in zip(ids, wanted, strict=True):
                if name in found and name not in aborted:
                    assert found[name] == expected
            assert aborted
            made.check_empty()


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
