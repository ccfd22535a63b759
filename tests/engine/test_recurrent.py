"""Models with recurrent layers: every sequence continues from its own states, and from no other."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
from observed import check_idle, preempt, slow, tokens, watch_batches

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.cache.kv_cache_manager import KVCacheManager
from kvconnect.engine.model.mixers import SequenceStates
from kvconnect.errors import UnsupportedModel, UsageError

GREEDY = SamplingParams(max_tokens=12)
FAMILIES = ["qwen3_next", "lfm2", "mamba", "minimax"]
LESS_OFTEN = [
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
    *("kimi_linear", "lfm2_moe", "lfm3", "mamba2", "nemotron_h", "olmo_hybrid"),
    *("qwen3_5_moe_text", "qwen3_5_text", "zamba", "zamba2", "zaya"),
    *("inkling_text", "recurrent_gemma", "rwkv", "xlstm"),
]
ALL = [*FAMILIES, *slow(*LESS_OFTEN)]


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("family", ALL)
def test_cold_chunked_batched_and_preempted(family, tiny, open_llm, reference, several):
    expected = reference(tiny(family), several, 12)
    cold = open_llm(tiny(family))
    assert tokens(cold.generate(several, GREEDY)) == expected
    # Chunks of every length, single tokens among them.
    chunked = open_llm(tiny(family), max_num_tokens=9)
    sent = preempt(chunked, lambda request: request.num_generated_tokens in {3, 8}, once=True)
    assert tokens(chunked.generate(several, GREEDY)) == expected
    assert len(sent) >= len(several)
    check_idle(chunked)


def test_states_change_the_answers(tiny, open_llm, reference, several, monkeypatch):
    """Or none of these tests would see a wrong one."""
    expected = reference(tiny("qwen3_next"), several, 12)
    llm = open_llm(tiny("qwen3_next"), max_num_tokens=25)
    monkeypatch.setattr(SequenceStates, "get_recurrent_state", lambda *_, **__: None)
    assert tokens(llm.generate(several, GREEDY)) != expected


def test_a_slot_begins_without_the_states_of_the_request_before(tiny, open_llm, reference, prompts):
    llm = open_llm(tiny("qwen3_next"), max_batch_size=1, max_num_tokens=25)
    slots = llm._engine._states.slots
    for _ in range(2):
        outputs = llm.generate(prompts[:4], GREEDY)
        assert tokens(outputs) == reference(tiny("qwen3_next"), prompts[:4], 12)
        assert len(slots) <= 1


def test_aborted_requests_give_their_slots_back(tiny, open_llm, reference, prompts):
    llm = open_llm(tiny("qwen3_next"), max_batch_size=2, max_num_tokens=16)
    for _ in range(3):
        for prompt in (prompts[0], prompts[4]):
            stream = llm.stream(prompt, SamplingParams(max_tokens=50))
            next(stream)
            stream.close()
    outputs = llm.generate(prompts[:4], GREEDY)
    assert tokens(outputs) == reference(tiny("qwen3_next"), prompts[:4], 12)
    assert len(llm._engine._states.slots) <= 2
    check_idle(llm)


def test_single_tokens_are_computed_together(tiny, open_llm, prompts, monkeypatch):
    cache = KvCacheConfig(tokens_per_block=16, max_tokens=1024, enable_block_reuse=False)
    llm = open_llm(tiny("lfm2"), kv_cache=cache)
    sizes = []
    called = SequenceStates.store

    def store(self):
        sizes.append(len(self.part.slots))
        called(self)

    monkeypatch.setattr(SequenceStates, "store", store)
    batches = watch_batches(llm)
    llm.generate(prompts[:4], SamplingParams(max_tokens=6, ignore_eos=True))
    assert [count for _, count in batches[-1]] == [1] * 4
    assert sizes[-1] == 4
    assert len(sizes) == 2 * (4 + 5)  # two mixers, four prompts, five steps of single tokens


# ---------------------------------------------------------------- refused


def test_a_manager_without_snapshots_reuses_nothing(
    tiny, open_llm, reference, prompts, caplog, tmp_path
):
    class Plain(KVCacheManager):
        supports_states = False

    with caplog.at_level(logging.WARNING, "kvconnect"):
        llm = open_llm(
            tiny("qwen3_next"),
            kv_cache_manager=Plain,
            max_num_tokens=25,
            connector=f"disk://{tmp_path}/kv?capacity=32MiB",
        )
    for _ in range(2):
        outputs = llm.generate(prompts[:3], GREEDY)
        assert tokens(outputs) == reference(tiny("qwen3_next"), prompts[:3], 12)
        assert {one.reused_device_tokens for one in outputs} == {0}
    assert len(llm.layouts) == 1
    said = [one.getMessage() for one in caplog.records if "recurrent" in one.getMessage()]
    assert said == [
        "The cache manager keeps no recurrent states: no prefix is reused",
        "No recurrent states are kept: the connector is not attached",
    ]
    assert not (tmp_path / "kv").exists()


def test_a_single_token_that_is_computed_otherwise_than_several_is_refused(tiny, tmp_path):
    """At its default `time_step_min` transformers bounds time steps of several tokens only."""
    model = tmp_path / "model"
    shutil.copytree(tiny("zamba2"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"time_step_min": 0.001}))
    with pytest.raises(UnsupportedModel, match="Zamba2MambaMixer computes something else"):
        LLM(model, kv_cache=KvCacheConfig(max_tokens=256))


def test_a_prefix_without_its_states_ends_the_engine(tiny, open_llm, prompts):
    """A wrong token is worse than an end."""
    cache = KvCacheConfig(tokens_per_block=16, max_tokens=1024, state_interval=32)
    llm = open_llm(tiny("qwen3_next"), kv_cache=cache)
    llm._engine._kv.state_restore = lambda *_: None
    llm.generate([prompts[0]], GREEDY)
    with pytest.raises(UsageError, match="continues at token 64, and the recurrent states are"):
        llm.generate([prompts[0]], GREEDY)
