"""Latents are cached in place of all heads; attention from them is that of the heads."""

from __future__ import annotations

import shutil

import pytest
import torch
from observed import slow, tokens
from transformers import AutoModelForCausalLM

from kvconnect import SamplingParams
from kvconnect.engine.model import latents as latents_module
from kvconnect.engine.model import model as model_module
from kvconnect.engine.model.latents import Latents, keep_latents
from kvconnect.engine.model.pool_groups import CacheGeometry, group_layouts
from kvconnect.engine.model.seam import LayerShape
from kvconnect.keys import Namespace, Shard, root_key
from kvconnect.shards import stored_heads

GREEDY = SamplingParams(max_tokens=12)
FAMILIES = ["deepseek_v2", "deepseek_v3"]
LESS_OFTEN = ["axk1", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu"]
ALL = [*FAMILIES, *slow(*LESS_OFTEN)]


def layout_of(*layers: LayerShape, tokens_per_block: int = 64):
    (layout,) = group_layouts(
        layers, [None] * len(layers), tokens_per_block=tokens_per_block, dtype=torch.bfloat16
    )
    return layout


# ---------------------------------------------------------------- memory, keys, ranks

HEADS = layout_of(*[LayerShape(128, 192, 128, None)] * 61)  # of DeepSeek-V3
LATENT = layout_of(*[LayerShape(1, 576, 0, None)] * 61)


def test_latents_take_a_fiftieth_of_the_heads():
    assert LATENT.is_latent
    assert not HEADS.is_latent
    assert LATENT.kv_factor == 1
    assert LATENT.token_nbytes == 61 * 576 * 2
    assert LATENT.block_nbytes * 50 <= HEADS.block_nbytes


def test_they_have_other_keys_than_heads_and_than_latents_of_other_engines():
    model = bytes(32)
    of_heads, of_latents = (
        CacheGeometry((one,), (None,), False, (one.num_kv_heads,)).digest(model)
        for one in (HEADS, LATENT)
    )
    roots = [
        root_key(of_heads, (HEADS,), Namespace()),
        root_key(of_latents, (LATENT,), Namespace()),
        root_key(model, (LATENT,), Namespace()),  # vLLM's, whose layout is the same
    ]
    assert len(set(roots)) == 3


def test_every_rank_has_the_whole_latent_and_the_first_one_stores_it():
    ranks = [stored_heads((LATENT,), Shard(rank, 4))[0] for rank in range(4)]
    assert [one.is_first for one in ranks] == [True, False, False, False]
    assert {one.own for one in ranks} == {Shard(0, 1)}


# ---------------------------------------------------------------- attention


@pytest.fixture(scope="module", params=ALL)
def module(request, tiny):
    """The attention of a family's first layer, in float64."""
    model = AutoModelForCausalLM.from_pretrained(tiny(request.param), dtype=torch.float64)
    return next(one for one in model.modules() if hasattr(one, "expand_kv"))


def test_absorbed_and_expanded_attention_agree(module):
    latents = Latents(module)
    keys, values = latents.expanded(torch.randn(1, 9, latents.dim, dtype=torch.float64))
    assert latents.agrees()
    assert keys.shape == values.shape == (4, 9, module.qk_head_dim)  # values have 16, padded
    assert not values[..., 16:].any()


def test_an_expansion_that_is_no_product_keeps_the_heads(module, monkeypatch):
    def bent(kv_nope, k_rot):
        return type(module).expand_kv(module, kv_nope.abs(), k_rot)

    monkeypatch.setattr(module, "expand_kv", bent, raising=False)
    assert not Latents(module).agrees()
    assert keep_latents(module) == 0


def test_what_is_not_plain_keeps_the_heads(module, monkeypatch):
    class Quantised(torch.nn.Linear):
        pass

    monkeypatch.setattr(module.kv_b_proj, "__class__", Quantised)
    assert keep_latents(module) == 0


def test_long_chunks_are_expanded_and_single_tokens_are_not(module):
    latents = Latents(module)
    assert latents.pays_to_expand(100, 100)
    assert latents.pays_to_expand(100, 4000)
    assert not latents.pays_to_expand(1, 4000)
    assert not latents.pays_to_expand(8, 4000)


# ---------------------------------------------------------------- the engine


@pytest.fixture(params=[True, False], ids=["expanded", "absorbed"])
def _chosen(request, monkeypatch):
    """Chunks are all expanded, a block at a time, or all absorbed."""
    monkeypatch.setattr(latents_module, "_EXPANDED", 1)
    monkeypatch.setattr(Latents, "pays_to_expand", lambda *_: request.param)


@pytest.mark.usefixtures("_chosen")
@pytest.mark.parametrize("family", ALL)
def test_cold_chunked_and_reused(family, tiny, open_llm, reference, prompts):
    llm = open_llm(tiny(family), max_num_tokens=24)
    assert all(one.is_latent and one.key_dim in {40, 48} for one in llm.layouts)
    for _ in range(2):
        assert tokens(llm.generate(prompts, GREEDY)) == reference(tiny(family), prompts, 12)


def test_blocks_of_heads_are_missed(tiny, open_llm, reference, prompts, tmp_path, monkeypatch):
    """An earlier version stored all heads of these models."""
    store, model = f"disk://{tmp_path}/kv?capacity=32MiB", tiny("deepseek_v3")
    same = shutil.copytree(model, tmp_path / "same")  # loaded models are lent by their directory
    with monkeypatch.context() as earlier:
        earlier.setattr(model_module, "keep_latents", lambda _: 0)
        with open_llm(same, connector=store, max_num_tokens=64) as llm:
            assert llm.layouts[0].num_kv_heads == 4
            llm.generate(prompts, GREEDY)
            assert llm.generate(prompts, GREEDY)[0].reused_device_tokens
    llm = open_llm(model, connector=store)
    outputs = llm.generate(prompts, GREEDY)
    assert tokens(outputs) == reference(model, prompts, 12)
    assert {one.reused_store_tokens for one in outputs} == {0}


@pytest.mark.slow
def test_two_ranks_keep_and_store_it_whole(tiny, open_llm, reference, prompts, tmp_path):
    """The plan of DeepSeek-V2 divides the heads that are made of the latent."""
    store, model = f"disk://{tmp_path}/kv?capacity=32MiB", tiny("deepseek_v2")
    expected = reference(model, prompts, 12)
    two = {"tensor_parallel_size": 2, "device": "cpu", "max_num_tokens": 48}
    with open_llm(model, connector=store, **two) as llm:
        assert [one.num_kv_heads for one in llm.layouts] == [1]
        assert tokens(llm.generate(prompts, GREEDY)) == expected
    outputs = open_llm(model, connector=store).generate(prompts, GREEDY)
    assert tokens(outputs) == expected
    assert sum(one.reused_store_tokens for one in outputs) > 200
