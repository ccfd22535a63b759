"""Models that compute attention themselves: called once a sequence, with a cache over the pages."""

from __future__ import annotations

import pytest
import torch
from families import computed_in
from observed import slow, tokens

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.engine.model.group_step import GroupStep
from kvconnect.engine.model.own_attention import OWN_ATTENTION, PADDED, probed
from kvconnect.errors import ConfigurationError, UnsupportedModel

GREEDY = SamplingParams(max_tokens=12)
# Scores by the model's own code; chunks that a token does not see beyond, as masks.
FAMILIES = ["falcon", "llama4_text"]
TOGETHER = sorted(OWN_ATTENTION - {*FAMILIES, "inkling_text", "inkling2_text"})
ALL_TOGETHER = [*FAMILIES, *slow(*TOGETHER)]
PADDED_LESS_OFTEN = slow(*sorted(PADDED - {"bloom", "falcon"}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"alibi": True}, {"new_decoder_architecture": True}, {"multi_query": False}], ids=str
)
def test_kinds_of_falcon(more, tiny, open_llm, reference, prompts):
    model = tiny("falcon", **more)
    llm = open_llm(model, max_num_tokens=25)
    for _ in range(2):
        assert tokens(llm.generate(prompts, GREEDY)) == reference(model, prompts, 12)


def test_other_keys_change_the_answers(tiny, open_llm, reference, prompts, monkeypatch):
    """Or none of these tests would see wrong ones."""
    gather = GroupStep.gather

    def last_are_first(self, pages):
        keys, values = gather(self, pages)
        return keys.flip(2), values

    monkeypatch.setattr(GroupStep, "gather", last_are_first)
    llm = open_llm(tiny("falcon"))
    assert tokens(llm.generate(prompts, GREEDY)) != reference(tiny("falcon"), prompts, 12)


def test_a_connector_hears_of_each_layer_once_a_step(tiny, open_llm, prompts):
    llm = open_llm(tiny("falcon"))
    heard: list[tuple[str, int]] = []
    connector, computed = llm._engine._connector, []
    connector.wait_for_layer_load = lambda layer: heard.append(("load", layer))
    connector.save_kv_layer = lambda layer: heard.append(("save", layer))
    apart = llm._engine._model._computed_apart

    def counted(step, count):
        computed.append(len(heard))
        return apart(step, count)

    llm._engine._model._computed_apart = counted
    llm.generate(prompts[:3], SamplingParams(max_tokens=1))
    layers = range(4)
    assert heard == [("load", one) for one in layers] + [("save", one) for one in layers]
    assert computed == [0, 4, 4]  # three sequences in one step


def watch_parts(llm) -> list[int]:
    """The number of sequences in each call of the model, from now on."""
    apart, sizes = llm._engine._model._computed_apart, []

    def counted(step, count):
        sizes.append(count)
        return apart(step, count)

    llm._engine._model._computed_apart = counted
    return sizes


@pytest.mark.parametrize("family", ALL_TOGETHER)
def test_single_tokens_at_one_position_are_computed_together(
    family, tiny, open_llm, reference, prompts
):
    several = [prompts[4][start : start + 20] for start in (0, 7, 30, 55)]
    several.insert(1, prompts[0])
    with computed_in(torch.float64, family):
        llm = open_llm(tiny(family))
        sizes = watch_parts(llm)
        outputs = llm.generate(several, SamplingParams(max_tokens=12, ignore_eos=True))
        assert sizes == [1] * 5 + [4, 1] * 11
        assert [one[: one.index(2) + 1] if 2 in one else one for one in tokens(outputs)] == (
            reference(tiny(family), several, 12)
        )


@pytest.mark.parametrize("family", ["bloom", "falcon", *PADDED_LESS_OFTEN])
def test_single_tokens_of_several_lengths_are_computed_together(
    family, tiny, open_llm, reference, prompts
):
    with computed_in(torch.float64, family):
        llm = open_llm(tiny(family))
        sizes = watch_parts(llm)
        several = [prompts[4][:35], prompts[0][:47], prompts[1], prompts[3], prompts[0][3:40]]
        params = SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True)
        outputs = llm.generate(several, params)
        assert sizes == [1] * 5 + [4, 1] * 11
        alone = [out for one in several for out in llm.generate([one], params)]
    for one, other in zip(outputs, alone, strict=True):
        assert one.output_token_ids == other.output_token_ids
        for found, same in zip(one.logprobs, other.logprobs, strict=True):
            assert [x.logprob for x in found.values()] == pytest.approx(
                [x.logprob for x in same.values()], abs=1e-4
            )


def test_an_attention_that_is_not_given_the_step_finds_it(tiny, open_llm, reference, prompts):
    """Nemotron passes no `kv=` to its attention."""
    llm = open_llm(tiny("nemotron"), max_num_tokens=25)
    for _ in range(2):
        outputs = llm.generate(prompts[:4], GREEDY)
        assert tokens(outputs) == reference(tiny("nemotron"), prompts[:4], 12)


# ---------------------------------------------------------------- refused


def test_tokens_whose_choice_is_ambiguous_are_refused(tiny, open_llm, reference):
    """Of a longer sequence Doge chooses tokens by their values, and equal tokens have equal ones.

    Which of them it takes differs between a prompt that is computed at once and one in chunks.
    """
    model = tiny("doge", keep_window_size=32)
    llm = open_llm(model, max_num_tokens=7)
    prompt, params = [5, 6, 7] * 7, SamplingParams(max_tokens=12)
    assert tokens(llm.generate([prompt], params)) == reference(model, [prompt], 12)
    with pytest.raises(ConfigurationError, match="exceed 32 positions"):
        llm.generate([[*prompt, 5]], params)


def test_ranks_do_not_divide_them(tiny):
    with pytest.raises(UnsupportedModel, match="ranks do not divide models that compute attention"):
        LLM(
            tiny("falcon"),
            tensor_parallel_size=2,
            device="cpu",
            kv_cache=KvCacheConfig(max_tokens=256),
        )


@pytest.mark.parametrize("windows", [(32,), (512, 32)])
def test_windows_of_the_cache_are_refused(windows, tiny):
    """These models attend to all tokens, and the blocks outside of the window would be gone."""
    cache = KvCacheConfig(max_tokens=256, max_attention_window=windows)
    with pytest.raises(UnsupportedModel, match="max_attention_window: this model computes"):
        LLM(tiny("gpt_neo"), kv_cache=cache)


def test_windows_that_hold_all_positions_are_none(tiny, open_llm, reference, prompts):
    cache = KvCacheConfig(tokens_per_block=16, max_tokens=256, max_attention_window=(512,))
    llm = open_llm(tiny("gpt_neo"), kv_cache=cache)
    assert tokens(llm.generate(prompts[:1], GREEDY)) == reference(tiny("gpt_neo"), prompts[:1], 12)


def test_layers_that_store_no_keys_or_others_again_are_refused():
    state = torch.zeros(1, 2, 1, 4)

    def storing(*order):
        def call(tokens, cache):
            for layer in order:
                cache.update(state, state, layer)
            return tokens[..., None]

        return call

    found = probed(storing(0, 1, 2), 3, "Model").stored.layers
    assert [(one.num_kv_heads, one.key_dim) for one in found] == [(2, 4)] * 3
    for wrong in ((0, 1), (0, 1, 1), (1, 0, 2), ()):
        with pytest.raises(UnsupportedModel, match="Model stores the keys of its 3 layers"):
            probed(storing(*wrong), 3, "Model")
