"""Layers that compute with fewer operations compute the same, or are left alone."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kvconnect.engine.model import lean_layers, projections
from kvconnect.engine.model.lean_layers import make_lean
from kvconnect.engine.model.model import Model
from kvconnect.engine.model.seam import ATTENTION

FAMILY = ["llama", "mistral", "qwen2"]


def load(directory: Path, dtype: torch.dtype = torch.float32):
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=ATTENTION
    )


def layers_of(model) -> list[nn.Module]:
    return list(model.model.layers)


class Mean:
    """A ``kv=`` that attends to everything alike, and knows what it was given."""

    last_tokens = torch.arange(4096)

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def attend(self, layer_idx, given):
        self.given += [given.query, given.key, given.value]
        groups = given.query.shape[1] // given.key.shape[1]
        seen = (given.key + given.value).mean(2, keepdim=True).repeat_interleave(groups, 1)
        return (given.query + seen).transpose(1, 2)


@pytest.mark.parametrize("arch", FAMILY)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-6), (torch.float32, 1e-4), (torch.bfloat16, 0.1)],
)
def test_the_output_is_that_of_transformers(model_of, arch, dtype, tolerance):
    plain, lean = load(model_of(arch), dtype), load(model_of(arch), dtype)
    assert make_lean(lean) == len(layers_of(plain)) == 3
    for tokens in (1, 7, lean_layers._TILE + 3):
        ids = torch.randint(0, 250, (1, tokens), generator=torch.Generator().manual_seed(1))
        places = torch.arange(tokens)[None]
        expected, found = Mean(), Mean()
        with torch.inference_mode():
            want = plain(ids, position_ids=places, use_cache=False, kv=expected).logits
            have = lean(ids, position_ids=places, use_cache=False, kv=found).logits
        assert (have - want).abs().max() <= tolerance * want.abs().max()
        for theirs, ours in zip(expected.given, found.given, strict=True):
            assert ours.shape == theirs.shape
            assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


@pytest.mark.parametrize("arch", FAMILY)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_weights_are_in_memory_once(model_of, arch, dtype):
    plain, lean = load(model_of(arch), dtype), load(model_of(arch), dtype)
    before = [weakref.ref(one) for one in lean.parameters()]
    make_lean(lean)
    gc.collect()
    alive = {id(one()) for one in before} - {id(None)}
    assert alive <= {id(one) for one in lean.parameters()}
    packed = 0
    for (name, want), (_, have) in zip(
        plain.named_parameters(), lean.named_parameters(), strict=True
    ):
        assert (have.shape, have.dtype) == (want.shape, want.dtype), name
        if have.is_meta:
            packed += want.numel()
        else:
            assert torch.equal(want, have), name
    plainly = [one.untyped_storage() for one in lean.parameters() if not one.is_meta]
    held = {one.data_ptr(): one for one in plainly}
    nbytes = sum(one.numel() for one in plain.parameters()) - packed
    assert sum(one.nbytes() for one in held.values()) == nbytes * dtype.itemsize
    per_layer = sum(
        one._weight.numel()
        for stack in layers_of(lean)
        for layer in stack.lean
        for one in layer._projections
        if isinstance(one, projections._Packed)
    )
    head = lean.lm_head.weight.numel() if lean.lm_head.weight.is_meta else 0
    assert packed == per_layer + head
    assert bool(packed) == projections._packs(dtype)


def test_a_matrix_is_packed_only_if_its_products_are_right(llama, monkeypatch):
    """As on a processor, or with a torch, whose products are others than expected."""
    monkeypatch.setattr(projections, "_packs", lambda dtype: True)
    monkeypatch.setattr(projections._Packed, "agrees_with", lambda self, weight: False)
    plain, model = load(llama), load(llama)
    assert make_lean(model) == 3
    for want, have in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(want, have)


def test_a_packed_weight_cannot_be_read_by_mistake(llama):
    if not projections._packs(torch.float32):
        pytest.skip("weights are not packed here")
    model = load(llama)
    make_lean(model)
    with pytest.raises((NotImplementedError, RuntimeError)):
        nn.functional.linear(torch.ones(1, 1), layers_of(model)[0].layers[0].mlp.up_proj.weight)


def test_tied_weights_stay_tied(tmp_path):
    from kvconnect.engine.checkpoint.random_model import make_model

    model = load(make_model(tmp_path, config_overrides={"tie_word_embeddings": True}))
    make_lean(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.is_contiguous()


def test_the_engine_uses_them(llama):
    model = Model(llama, dtype="float32", device="cpu")
    (stack,) = layers_of(model._model)
    assert [one.is_last for one in stack.lean] == [False, False, True]


@pytest.mark.parametrize("wanted", [[6], [2, 6], [0, 1, 2, 3, 5, 6]])
def test_the_last_layer_computes_what_is_looked_at(model_of, wanted):
    """The others' keys and values are there all the same."""

    class Given(Mean):
        last_tokens = torch.tensor(wanted)

        def attend(self, layer_idx, given):
            found = super().attend(layer_idx, given)
            assert given.query.shape[2] == (len(wanted) if layer_idx == 2 else 7)
            return found

    plain, lean = load(model_of("llama"), torch.float64), load(model_of("llama"), torch.float64)
    make_lean(lean)
    ids, places = torch.arange(7)[None], torch.arange(7)[None]
    expected, found = Mean(), Given()
    with torch.inference_mode():
        want = plain(ids, position_ids=places, use_cache=False, kv=expected).logits[:, wanted]
        have = lean(
            ids,
            position_ids=places,
            use_cache=False,
            kv=found,
            logits_to_keep=torch.tensor(wanted),
        ).logits
    torch.testing.assert_close(have, want, rtol=1e-6, atol=1e-6)
    for theirs, ours in zip(expected.given[-2:], found.given[-2:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_model_that_looks_at_all_tokens_gets_them(llama):
    """Whatever stands between the last layer and the logits."""
    model = load(llama)
    model.model.norm.register_forward_hook(lambda module, args, output: output.cumsum(1))
    make_lean(model)
    (stack,) = layers_of(model)
    assert not any(layer.is_last for layer in stack.lean)


@pytest.mark.parametrize("arch", ["qwen3", "gemma3", "olmo", "phi", "gpt2"])
def test_other_layers_are_left_alone(model_of, arch):
    assert make_lean(load(model_of(arch))) == 0


def test_a_layer_that_computes_something_else_is_left_alone(llama, caplog):
    """As after a change in transformers, or with a layer of the user's own under the same name."""
    model = load(llama)
    odd = layers_of(model)[1]
    odd.self_attn.scaling = 0.5
    odd.mlp.register_forward_hook(lambda module, args, output: output * 1.01)
    assert make_lean(model) == 2
    before, kept, after = layers_of(model)
    assert kept is odd
    assert [len(stack.layers) for stack in (before, after)] == [1, 1]
    assert "LlamaDecoderLayer computes something else than expected" in caplog.text


def test_a_projection_of_another_kind_is_left_alone(llama):
    class Quantised(nn.Linear):
        pass

    model = load(llama)
    layers_of(model)[0].mlp.up_proj.__class__ = Quantised
    assert make_lean(model) == 2


def test_another_activation_is_left_alone(llama, caplog):
    model = load(llama)
    for layer in layers_of(model):
        layer.mlp.act_fn = nn.GELU()
    assert make_lean(model) == 0
    assert not caplog.text
