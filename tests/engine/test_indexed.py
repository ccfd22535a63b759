"""Layers whose index chooses the tokens that are attended to: its keys are a layer of the cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import FirstOfEquals, write_tiny
from frame_store import FrameStore
from observed import patient, slow, tokens

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.engine.model import chosen_tokens, indexers
from kvconnect.engine.model.model import check_sharing
from kvconnect.engine.model.pages import LayerPages
from kvconnect.engine.model.pool_groups import CacheGeometry, group_layouts
from kvconnect.engine.model.scores import AttentionInput
from kvconnect.engine.model.seam import LayerShape
from kvconnect.errors import UnsupportedModel
from kvconnect.keys import Namespace, root_key
from kvconnect.layout import KvCacheLayout

GREEDY = SamplingParams(max_tokens=12)
# Latents; sinks, and layers that share an index; keys of several tokens, and recurrent layers.
FAMILIES = ["deepseek_v32", "hy_v4", "qwen4_exp_text"]
LESS_OFTEN = ["axk2", "dots3_note_text", "glm_moe_dsa"]
ALL = [*FAMILIES, *slow(*LESS_OFTEN)]


@pytest.fixture
def sparse(tiny):
    """Writes a model of a family that attends to 8 tokens of each sequence."""

    def write(family: str, **more: object):
        chosen = {"indexer_budget": 8} if family == "qwen4_exp_text" else {"index_topk": 8}
        return tiny(family, **(chosen | more))

    return write


@pytest.mark.parametrize(
    ("family", "borders"),
    [
        ("deepseek_v32", range(13, 62, 12)),
        *slow(*((one, range(1, 60, 7)) for one in (*FAMILIES, *LESS_OFTEN))),
    ],
)
def test_chunks_of_any_length(family, borders, sparse, open_llm, reference, prompts, monkeypatch):
    """Also where a chunk is computed in parts, because scores or keys would be too large."""
    model, prompt = sparse(family), prompts[4][:60]
    expected = reference(model, [prompt], 12)
    monkeypatch.setattr(chosen_tokens, "_MOST_SCORES", 8 * 5 * 60)
    monkeypatch.setattr(chosen_tokens, "_MOST_KEYS", 8 * 16 * 3)
    for border in borders:
        llm = open_llm(model, max_num_tokens=border)
        assert tokens(llm.generate([prompt], GREEDY)) == expected
        llm.close()


@pytest.mark.parametrize("family", ["deepseek_v32", *ALL[1:]])
def test_the_choice_changes_the_answers(family, sparse, reference, prompts):
    """Or none of these tests would see that all tokens are attended to."""
    field = "indexer_budget" if family == "qwen4_exp_text" else "index_topk"
    model, whole = sparse(family), sparse(family, **{field: 512})
    assert reference(model, prompts[:1], 12) != reference(whole, prompts[:1], 12)


@pytest.mark.slow
def test_layers_that_embed_several_tokens(open_llm, reference, prompts, tmp_path):
    """Qwen4's keep the last tokens as a state beside those of the delta net."""
    more = {"ple_layer_ids": [1], "indexer_budget": 8}
    model, store = write_tiny(tmp_path, "qwen4_exp_text", **more), f"disk://{tmp_path}/kv"
    expected = reference(model, prompts, 12)
    for reused in ("reused_device_tokens", "reused_store_tokens"):
        llm = open_llm(model, connector=store, max_num_tokens=25, max_tokens=8192)
        first, again = llm.generate(prompts, GREEDY), llm.generate(prompts, GREEDY)
        assert tokens(first) == tokens(again) == expected
        outputs = again if reused == "reused_device_tokens" else first
        assert sum(getattr(one, reused) for one in outputs) > 150
        llm.close()


def test_of_other_sequences_not_even_hidden_tokens_are_read():
    """Some of the chosen ones lie behind the end of a short sequence; a mask hides no NaN."""
    buffers = torch.randn(4, 2, 4, 1, 8, dtype=torch.float64)
    buffers[0] = torch.nan
    layout = KvCacheLayout(1, 1, 8, 8, tokens_per_block=4, dtype=torch.float64)
    q = torch.randn(1, 2, 2, 8, dtype=torch.float64)
    given = AttentionInput(q, q[:, :1], q[:, :1], scaling=None, window=None)
    tables = [np.array([3]), np.array([1, 2])]
    attended = chosen_tokens.ChosenTokens.of([2, 6], [3, 7], tables, 4, torch.device("cpu"))
    chosen = torch.tensor([[0, 1, 2, 3, 5], [0, 1, 4, 6, -1]])
    out = attended.attended(chosen, given, LayerPages(buffers, layout))
    for row, (block, offset) in enumerate((([3] * 3, [0, 1, 2]), ([1, 1, 2, 2], [0, 1, 0, 2]))):
        k, v = buffers[block, :, offset].unbind(1)
        weights = (q[0, :, row] @ k[:, 0].T * 8**-0.5).softmax(-1)
        torch.testing.assert_close(out[row], weights @ v[:, 0])


# ---------------------------------------------------------------- equal scores


def test_of_equal_scores_the_first_tokens_are_chosen(sparse, open_llm, reference, prompts):
    """With one head of the index, half of the scores are zero: too many to choose from."""
    model = sparse("glm_moe_dsa", index_n_heads=1)
    for size in (7, 200):
        llm = open_llm(model, max_num_tokens=size)
        assert tokens(llm.generate(prompts[:2], GREEDY)) == reference(model, prompts[:2], 12)
        llm.close()


@pytest.mark.parametrize("length", [9, 60, 700])
def test_equal_values_of_any_number(length):
    generator = torch.Generator().manual_seed(length)
    values = torch.randint(-2, 2, (40, length), generator=generator).relu().float()
    values[0], values[1, 3:] = 0, -torch.inf
    with FirstOfEquals():
        expected = values.topk(8).indices
    with indexers._FirstOfEquals():
        found = values.topk(8)
        along = values.T.topk(8, dim=0)
    assert torch.equal(found.indices.sort().values, expected.sort().values)
    assert torch.equal(found.values, values.gather(1, found.indices))
    assert torch.equal(along.indices.T, found.indices)
    with indexers._FirstOfEquals():
        assert values.fill_(torch.nan).topk(8).indices.shape == (40, 8)  # and no error


# ---------------------------------------------------------------- memory and keys


def test_its_keys_lie_beside_the_latents_which_are_stored_once(sparse, open_llm):
    index, latent = open_llm(sparse("hy_v4")).layouts  # two of four layers have an index
    assert [one.kind for one in (index, latent)] == ["latent", "latent"]
    assert (index.layers, index.key_dim) == ((0, 2), 16)
    assert (latent.layers, latent.key_dim) == ((1, 3, 4, 5), 40)


def test_keys_of_blocks_name_the_index():
    model, latent = bytes(32), LayerShape(1, 576, 0, None)
    roots = set()
    for index in (None, 64, 128):
        own = [] if index is None else [LayerShape(1, index, 0, None, is_index=True)]
        layers = [*own, latent, *own, latent]
        layouts = group_layouts(
            layers, [None] * len(layers), tokens_per_block=64, dtype=torch.bfloat16
        )
        geometry = CacheGeometry(layouts, (None,) * len(layers), False, (1,) * len(layouts))
        roots.add(root_key(geometry.digest(model), geometry.whole_layouts, Namespace()))
    assert len(roots) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_other_index_keys_change_the_answers(family, sparse, open_llm, prompts):
    llm = open_llm(sparse(family))
    (before,) = llm.generate([prompts[4]], GREEDY)
    memory = llm._engine._kv.get_buffers(0)[0]
    memory.copy_(memory.flip(0))
    (after,) = llm.generate([prompts[4]], GREEDY)
    assert after.reused_device_tokens > 90
    assert after.output_token_ids != before.output_token_ids


@pytest.mark.parametrize("group", [0, 1])
def test_a_prefix_counts_only_with_the_index(group, sparse, open_llm, reference, prompts):
    """Frames of the index, or of the latents, are gone behind the second block."""
    model, store = sparse("deepseek_v32"), FrameStore()
    connector = patient(store)
    with open_llm(model, connector=connector) as llm:
        llm.generate([prompts[4]], GREEDY)
    of_group = [key for key in store.frames if store.groups[key] == group]
    for key in of_group[2:]:
        del store.frames[key]
    outputs = open_llm(model, connector=connector).generate([prompts[4]], GREEDY)
    assert tokens(outputs) == reference(model, [prompts[4]], 12)
    assert outputs[0].reused_store_tokens == 32


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v32", "hy_v4"])
def test_blocks_go_to_the_host_tier_and_back(family, sparse, open_llm, reference, prompts):
    cache = KvCacheConfig(tokens_per_block=16, max_tokens=160, host_cache_size=4 << 20)
    llm = open_llm(sparse(family), kv_cache=cache, max_num_tokens=40)
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY)
        assert tokens(outputs) == reference(sparse(family), prompts, 12)
    assert sum(one.reused_host_tokens for one in outputs) > 0


def test_in_fp8_reused_it_gives_the_tokens_it_gave_cold(sparse, open_llm, reference, prompts):
    model = sparse("deepseek_v32")
    fp8 = KvCacheConfig(tokens_per_block=16, max_tokens=1024, dtype="fp8")
    expected = tokens(open_llm(model, kv_cache=fp8).generate(prompts[:2], GREEDY))
    assert expected != reference(model, prompts[:2], 12)
    llm = open_llm(model, kv_cache=fp8, max_num_tokens=33)
    for _ in range(2):
        assert tokens(llm.generate(prompts[:2], GREEDY)) == expected


@pytest.mark.slow
def test_two_ranks_keep_and_store_the_index_whole(sparse, open_llm, reference, prompts, tmp_path):
    store, model = f"disk://{tmp_path}/kv?capacity=32MiB", sparse("deepseek_v32")
    expected = reference(model, prompts[:2], 12)
    two = {"tensor_parallel_size": 2, "device": "cpu", "max_num_tokens": 48}
    with open_llm(model, connector=store, **two) as llm:
        assert [one.num_kv_heads for one in llm.layouts] == [1, 1]
        assert tokens(llm.generate(prompts[:2], GREEDY)) == expected
    outputs = open_llm(model, connector=store).generate(prompts[:2], GREEDY)
    assert tokens(outputs) == expected
    assert [one.reused_store_tokens for one in outputs] == [69, 32]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["axk2", "glm_moe_dsa", "qwen4_exp_text"])
def test_two_ranks(family, sparse, open_llm, reference, prompts):
    llm = open_llm(sparse(family), tensor_parallel_size=2, device="cpu", max_num_tokens=48)
    assert tokens(llm.generate(prompts[:2], GREEDY)) == reference(sparse(family), prompts[:2], 12)


@pytest.mark.parametrize(
    ("family", "reason"),
    [("dots3_note_text", "layers may differ in their number"), ("hy_v4", "is a HYV4Attention")],
)
def test_two_ranks_are_refused(family, reason, sparse):
    with pytest.raises(UnsupportedModel, match=f"tensor_parallel_size: .*{reason}"):
        check_sharing(sparse(family), 2)


def test_windows_of_the_cache_are_refused(sparse):
    """A token outside of the window would be chosen, and its block be gone."""
    cache = KvCacheConfig(max_tokens=256, max_attention_window=[64])
    with pytest.raises(UnsupportedModel, match="max_attention_window: this model's layers choose"):
        LLM(sparse("deepseek_v32"), kv_cache=cache)
