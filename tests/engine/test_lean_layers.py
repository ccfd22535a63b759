"""Layers that compute with fewer operations compute the same, or are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from kvconnect.engine.model import lean_layers
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
@pytest.mark.parametrize("tokens", [1, 7, lean_layers._TILE + 3])
def test_the_output_is_that_of_transformers(model_of, arch, dtype, tolerance, tokens):
    plain, lean = load(model_of(arch), dtype), load(model_of(arch), dtype)
    assert make_lean(lean) == len(layers_of(lean)) == 3
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
def test_weights_keep_their_values_and_take_no_more_memory(model_of, arch):
    plain, lean = load(model_of(arch)), load(model_of(arch))
    make_lean(lean)
    for (name, before), (_, after) in zip(
        plain.named_parameters(), lean.named_parameters(), strict=True
    ):
        assert torch.equal(before, after), name
    held = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in lean.parameters()}
    nbytes = sum(one.numel() * one.element_size() for one in plain.parameters())
    assert sum(one.nbytes() for one in held.values()) == nbytes


def test_tied_weights_stay_tied(tmp_path):
    from kvconnect.engine.checkpoint.random_model import make_model

    model = load(make_model(tmp_path, config_overrides={"tie_word_embeddings": True}))
    make_lean(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.is_contiguous()


def test_the_engine_uses_them(llama):
    model = Model(llama, dtype="float32", device="cpu")
    assert {type(layer.forward) for layer in layers_of(model._model)} == {lean_layers._LeanLayer}


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
    assert not isinstance(odd.forward, lean_layers._LeanLayer)
    assert "LlamaDecoderLayer computes something else than expected" in caplog.text


def test_a_projection_of_another_kind_is_left_alone(llama):
    class Quantised(nn.Linear):
        pass

    model = load(llama)
    layers_of(model)[0].mlp.up_proj.__class__ = Quantised
    assert make_lean(model) == 2
