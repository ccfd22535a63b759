"""Models that keep states or compute attention in ways of their own: equal to `generate()`.

Their answers repeat tokens more often than others', so log probabilities are compared, too.
"""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from families import computed_in, write_tiny
from observed import check_idle, preempt, slow, tokens
from parrot import EAGER, Parrot, draft_with
from transformers import AutoModelForCausalLM

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.engine.model import adapted
from kvconnect.engine.model.group_step import GroupStep
from kvconnect.engine.model.mixers import SequenceStates
from kvconnect.engine.model.model import Model
from kvconnect.errors import ConfigurationError, UnsupportedModel

GREEDY = SamplingParams(max_tokens=12, logprobs=0)
# States in modules, in tensors of all layers; no cache; windows in masks only; own attention, also
# beside convolutions.
FAMILIES = ["big_bird", "inkling_text", "openai-gpt", "phimoe", "recurrent_gemma", "rwkv"]
LESS_OFTEN = ["inkling2_text", "trocr", "whisper", "xglm", "xlstm"]
ALL = [*FAMILIES, *slow(*LESS_OFTEN)]
RECURRENT = {"inkling_text", "inkling2_text", "recurrent_gemma", "rwkv", "xlstm"}


@pytest.fixture(autouse=True)
def _float64(request):
    family = request.node.callspec.params.get("family") if hasattr(request.node, "callspec") else ""
    with computed_in(torch.float64, family or ""):
        yield


@pytest.fixture(scope="module")
def several(prompts) -> list[list[int]]:
    return [prompts[0], prompts[2], prompts[4][:60], prompts[5], prompts[7]]


def chosen(outputs) -> torch.Tensor:
    """The log probabilities of the answers' tokens."""
    found = [[row[token].logprob for token, row in zip(o.output_token_ids, o.logprobs, strict=True)]
             for o in outputs]  # fmt: skip
    return torch.tensor([one for row in found for one in row], dtype=torch.float32)


def expected_logprobs(directory, prompts, answers) -> torch.Tensor:
    """Those of `generate()`, in one pass over prompt and answer: of its first call's kind."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, experts_implementation="eager"
    )
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + answer[:-1]])
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        found.append(torch.log_softmax(logits.float(), dim=-1)[range(len(answer)), answer])
    return torch.cat(found)


@pytest.mark.parametrize("family", ALL)
def test_cold_chunked_reused_drafted_and_preempted(family, tiny, open_llm, reference, several):
    expected = reference(tiny(family), several, 12)
    scores = expected_logprobs(tiny(family), several, expected)
    cache = KvCacheConfig(tokens_per_block=16, max_tokens=1024, state_interval=32)
    llm = open_llm(tiny(family), kv_cache=cache, max_num_tokens=25, speculative=EAGER)
    for wrong_every in (0, 3):
        whole = [p + a for p, a in zip(several, expected, strict=True)]
        draft_with(llm, Parrot(whole, wrong_every))
        outputs = llm.generate(several, GREEDY)
        assert tokens(outputs) == expected
        torch.testing.assert_close(chosen(outputs), scores, atol=2e-4, rtol=0)
    assert sum(one.reused_device_tokens for one in outputs) > 100
    assert llm.stats().drafted_tokens > llm.stats().accepted_tokens > 0
    sent = preempt(llm, lambda request: request.num_generated_tokens in {3, 8})
    assert tokens(llm.generate(several, GREEDY)) == expected
    assert sent
    check_idle(llm)


@pytest.mark.parametrize(
    "family", ["inkling_text", "rwkv", *slow(*FAMILIES[:1], *FAMILIES[2:5], *LESS_OFTEN)]
)
def test_with_a_store_and_a_restart(family, tiny, open_llm, reference, several, tmp_path):
    expected = reference(tiny(family), several, 12)
    for _ in range(2):
        with open_llm(tiny(family), connector=f"disk://{tmp_path}/kv?capacity=64MiB") as llm:
            outputs = llm.generate(several, GREEDY)
            assert tokens(outputs) == expected
    assert outputs[0].reused_store_tokens >= 64


@pytest.mark.parametrize("family", ["inkling_text", "openai-gpt", "recurrent_gemma", "rwkv"])
def test_wrong_keys_and_wrong_states_change_log_probabilities(
    family, tiny, open_llm, reference, several, monkeypatch
):
    """Or none of these tests would see them."""
    expected = reference(tiny(family), several, 12)
    scores = expected_logprobs(tiny(family), several, expected)
    if family in RECURRENT:
        name = "get_conv_state" if family == "inkling_text" else "get_recurrent_state"
        get = getattr(SequenceStates, name)

        def doubled(*args, **named):
            found = get(*args, **named)
            return None if found is None else found * 2

        llm = open_llm(tiny(family), max_num_tokens=25)
        monkeypatch.setattr(SequenceStates, name, doubled)
    else:
        llm = open_llm(tiny(family), max_num_tokens=25)
        write = GroupStep.write
        monkeypatch.setattr(
            GroupStep, "write", lambda self, pages, k, v: write(self, pages, k.flip(1), v)
        )
    outputs = llm.generate(several, GREEDY)
    assert tokens(outputs) != expected or not torch.allclose(chosen(outputs), scores, atol=2e-4)


# ---------------------------------------------------------------- adapted


def test_a_state_that_is_not_kept_is_noticed(tiny, monkeypatch):
    def forgetful(module, *args, past_key_values, use_cache, **named):
        if past_key_values is not None:
            for number in range(2):
                past_key_values.get_recurrent_state(module.layer_idx, number)
                state = torch.zeros(1, 64)
                past_key_values.update_recurrent_state(state, module.layer_idx, number)
        return type(module).forward(module, *args, use_cache=False, **named)

    monkeypatch.setattr(adapted, "_recur", forgetful)
    with pytest.raises(UnsupportedModel, match="computes something else from a token and its"):
        Model(tiny("recurrent_gemma"), dtype="float64")


def test_rwkv_divides_the_weights_of_deep_layers(tiny, open_llm, reference, several):
    """Its first call in the place of training does, once."""
    model = tiny("rwkv", rescale_every=2)
    llm = open_llm(model, max_num_tokens=25)
    for _ in range(2):
        assert tokens(llm.generate(several, GREEDY)) == reference(model, several, 12)


# ---------------------------------------------------------------- limits and refusals


def test_a_sparse_big_bird_is_served_as_far_as_its_attention_is_full(
    tiny, open_llm, reference, prompts
):
    more = {"attention_type": "block_sparse", "num_random_blocks": 1, "block_size": 8}
    model = tiny("big_bird", **more)
    llm = open_llm(model, max_num_tokens=25)
    prompt = prompts[0][:44]
    assert tokens(llm.generate([prompt], GREEDY)) == reference(model, [prompt], 12)
    with pytest.raises(
        ConfigurationError, match=r"exceed 56 positions .* beyond which it is spars"
    ):
        llm.generate([[*prompt, 5, 5]], GREEDY)


def test_whisper_has_as_many_positions_as_its_configuration_says(tiny, open_llm):
    llm = open_llm(tiny("whisper", max_target_positions=40))
    with pytest.raises(ConfigurationError, match="exceed 40 positions"):
        llm.generate([[5] * 30], GREEDY)


def test_positions_that_leave_out_padding_are_refused(tmp_path):
    write_tiny(tmp_path, "trocr", use_learned_position_embeddings=False)
    with pytest.raises(UnsupportedModel, match="positions leave out padding"):
        LLM(tmp_path)


@pytest.mark.parametrize("family", ["big_bird", "megatron-bert", "rembert", "roformer"])
def test_encoders_are_refused(family, tiny, tmp_path):
    shutil.copytree(tiny(family), tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"is_decoder": False}))
    with pytest.raises(UnsupportedModel, match="attends to later tokens: bidirectional attention"):
        LLM(tmp_path / "model")


def test_a_model_that_transformers_cannot_compute_in_float64_is_refused(tiny):
    with pytest.raises(UnsupportedModel, match=r"XGLMForCausalLM cannot compute in torch.float64"):
        LLM(tiny("xglm"), dtype="float64")


@pytest.mark.slow
@pytest.mark.parametrize("own", ["inkling2_text", "xglm"])
def test_in_the_dtype_that_transformers_computes_in(own, tiny, open_llm, prompts):
    """Without what `computed_in` does."""
    model = AutoModelForCausalLM.from_pretrained(tiny(own), experts_implementation="eager")
    llm = open_llm(tiny(own), dtype="float32", max_num_tokens=25)
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        found = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
        assert found[0, len(prompt) :].tolist() == list(output.output_token_ids)
