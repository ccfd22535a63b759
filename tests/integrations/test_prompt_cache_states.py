"""`PromptCache` with recurrent layers and latents: ``generate()`` answers as without it."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny_config
from frame_store import FrameStore
from prompts import answer as answered
from prompts import generate as generated
from prompts import given
from prompts import opened as opened_with
from prompts import prompt as tokens
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from kvconnect.errors import ConfigurationError, UnsupportedModel, UsageError

# Fields with which a tiny model has both attention and recurrent layers.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "kimi_linear": {
        "linear_attn_config": {
            "num_heads": 4,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 3],
            "full_attn_layers": [2, 4],
        }
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "minimax": {"sliding_window": None},
    "nemotron_h": {
        "layer_types": ["linear_attention", "moe", "full_attention", "linear_attention"]
    },
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "initializer_range": 1.0},
}
_PAGE = Path(__file__).parents[2] / "docs/engines.md"
_ROW = re.compile(r"^\| (`[\w, `]+`) \| (equal|equal \(latents\)|refused: .+) \|$", re.MULTILINE)


def rows() -> dict[str, str]:
    """Returns what the page says of each family."""
    text = _PAGE.read_text(encoding="utf-8")
    section = text.partition("### Recurrent layers")[2].partition("\n#")[0]
    return {
        name: said
        for names, said in _ROW.findall(section)
        for name in re.findall(r"[^`, ]+", names)
    }


ROWS = rows()
QUICK = {"qwen3_next", "lfm2"}  # a gated delta net, a short convolution
RECURRENT = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name, said in ROWS.items()
    if said == "equal"
]
LATENT = [
    pytest.param(name, marks=pytest.mark.slow)
    for name, said in ROWS.items()
    if said == "equal (latents)"
]
REFUSED = [name for name, said in ROWS.items() if said.startswith("refused")]

Loaded = Callable[[str], PreTrainedModel]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    """A tiny model in float64 with large weights, not to be changed."""

    @cache
    def load(family: str) -> PreTrainedModel:
        config = tiny_config(family, **FIELDS.get(family, {}))
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float64, experts_implementation="eager"
            )
            for parameter in model.parameters():
                if parameter.ndim < 2:  # norms and biases: zeros and ones at first
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)
        model.generation_config = GenerationConfig(pad_token_id=0)
        return model.eval()

    return load


opened = partial(opened_with, state_interval=32)
generate = partial(generated, max_new_tokens=12)
answer = partial(answered, max_new_tokens=12)


def leaving(ids: Tensor, at: int, length: int, seed: int) -> Tensor:
    """Returns a prompt that leaves `ids` behind `at` tokens."""
    other = tokens(length - at, seed)
    if at < ids.shape[1] and other[0, 0] == ids[0, at]:
        other[0, 0] += 1
    return torch.cat([ids[:, :at], other], dim=1)


# ---------------------------------------------------------------------- right answers


@pytest.mark.parametrize("family", RECURRENT)
def test_answers_are_those_of_transformers_cold_and_from_every_snapshot(loaded, family):
    model, first = loaded(family), tokens(75, seed=1)
    with opened(model, FrameStore()) as prompts:
        assert answer(model, prompts, first) == (generate(model, first), (0,))
        # Up to the last whole block; at the interval; at no snapshot, which leaves one at 48.
        for ids, count in (
            (first, 64),
            (leaving(first, 35, 80, seed=2), 32),
            (leaving(first, 50, 80, seed=3), 32),
            (leaving(first, 50, 90, seed=4), 48),
            (leaving(first, 20, 60, seed=5), 0),
            (leaving(first, 20, 60, seed=6), 16),
        ):
            assert answer(model, prompts, ids) == (generate(model, ids), (count,))
        # Of an answer nothing is loaded: single tokens are computed by other code than a prompt's.
        going_on = torch.cat([torch.tensor(generate(model, first)), tokens(9, seed=7)], dim=1)
        assert answer(model, prompts, going_on) == (generate(model, going_on), (64,))
        # A prompt that ends with a block has its state there, for the next one.
        even = torch.cat([first, tokens(5, seed=8)], dim=1)
        longer = torch.cat([even, tokens(7, seed=9)], dim=1)
        assert answer(model, prompts, even) == (generate(model, even), (64,))
        assert answer(model, prompts, longer) == (generate(model, longer), (80,))


@pytest.mark.parametrize("family", LATENT)
def test_latents_are_restored_like_keys(loaded, family):
    model, ids = loaded(family), tokens(75, seed=1)
    with opened(model, FrameStore()) as prompts:
        for count in (0, 64):
            assert answer(model, prompts, ids) == (generate(model, ids), (count,))
        prompts.flush()


def test_single_tokens_are_not_loaded_where_they_are_computed_otherwise(loaded):
    """Zamba2 limits its time steps in passes of several tokens only."""
    model, first = loaded("zamba2"), tokens(75, seed=1)
    with opened(model, FrameStore()) as prompts:
        # Through the end of a block at 96, where a snapshot is due.
        said = torch.tensor(answer(model, prompts, first, max_new_tokens=30)[0])
        going_on = torch.cat([said, tokens(9, seed=7)], dim=1)
        for count in (64, 112):
            assert answer(model, prompts, going_on) == (generate(model, going_on), (count,))
        one_more = first[:, :65]  # not 64: its last token would be a pass of one
        assert answer(model, prompts, one_more) == (generate(model, one_more), (32,))


def test_a_snapshot_is_found_far_behind_the_keys_and_values(loaded):
    model = loaded("lfm2")
    first = tokens(40, seed=1)
    with opened(model, FrameStore(), state_interval=1024) as prompts:
        answer(model, prompts, first)
        long = torch.cat([first, tokens(420, seed=2)], dim=1)
        assert answer(model, prompts, long)[1] == (32,)
        for count in (32, 400):  # found 23 blocks before; then at the branch
            ids = leaving(long, 405, 440, seed=count)
            assert answer(model, prompts, ids) == (generate(model, ids), (count,))


def test_a_batch_is_loaded_up_to_a_snapshot_of_all_rows(loaded):
    model = loaded("qwen3_next")
    one, other = tokens(75, seed=1), tokens(75, seed=2)
    both = torch.cat([one, leaving(other, 40, 75, seed=3)])
    with opened(model, FrameStore()) as prompts:
        assert answer(model, prompts, both)[0] == generate(model, both)
        for ids, count in ((both, 64), (torch.cat([one, other]), 32)):
            assert answer(model, prompts, ids) == (generate(model, ids), (count, count))


def test_a_snapshot_that_a_batch_lacks_is_saved_again(loaded):
    """Though the store has a later one of the row that lacks it."""
    model, store = loaded("lfm2"), FrameStore()
    one, other = tokens(75, seed=1), tokens(75, seed=2)
    both = torch.cat([one, leaving(other, 40, 75, seed=3)])
    with opened(model, store) as prompts:
        answer(model, prompts, one)
        assert prompts.flush()
        states = [key for key, group in store.groups.items() if group == 1]
        answer(model, prompts, other)
        assert prompts.flush()
        del store.frames[states[0]]  # of `one` at 32
        assert answer(model, prompts, both) == (generate(model, both), (0, 0))
        assert prompts.flush()
        assert states[0] in store.frames


def test_a_padded_batch_is_computed_and_says_why(loaded):
    model, ids = loaded("qwen3_next"), tokens(40, seed=1).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    with opened(model, FrameStore()) as prompts:
        past = prompts.prefill({"input_ids": ids, "attention_mask": mask})
        assert "differ in length" in past.not_cached
        settings = {"max_new_tokens": 4, "attention_mask": mask, "do_sample": False}
        expected = model.generate(ids, **settings).tolist()
        assert model.generate(ids, past_key_values=past, **settings).tolist() == expected


def test_assisted_decoding_of_a_model_with_short_convolutions(loaded):
    model, ids = loaded("lfm2"), tokens(20, seed=1).repeat(1, 4)
    expected = generate(model, ids, max_new_tokens=30)
    with opened(model, FrameStore()) as prompts:
        for count in (0, 64):
            past = prompts.prefill(given(ids))
            found = generate(
                model, ids, max_new_tokens=30, past_key_values=past, prompt_lookup_num_tokens=5
            )
            assert (found, past.loaded_tokens) == (expected, (count,))
        going_on = torch.tensor(expected)
        assert answer(model, prompts, going_on)[0] == generate(model, going_on)


def test_states_are_not_cropped(loaded):
    model, ids = loaded("qwen3_next"), tokens(40, seed=1)
    with opened(model, FrameStore()) as prompts:
        past = prompts.prefill(given(ids))
        with pytest.raises(UsageError, match="taking tokens back from recurrent states"):
            past.crop(-4)
        assert past.get_seq_length() == 32
        assert generate(model, ids, past_key_values=past) == generate(model, ids)


def test_a_copy_of_a_cache_is_a_plain_one(loaded):
    model, ids = loaded("falcon_h1"), tokens(40, seed=1)
    with opened(model, FrameStore()) as prompts:
        past = prompts.prefill(given(ids))
        copied = copy.deepcopy(past)
        for one in (past, copied):
            assert generate(model, ids, past_key_values=one) == generate(model, ids)


def test_another_prompt_than_was_prefilled_is_refused_also_cold(loaded):
    model, ids = loaded("lfm2"), tokens(40, seed=1)
    with opened(model, FrameStore()) as prompts:
        past = prompts.prefill(given(ids))
        with pytest.raises(UsageError, match="other tokens"):
            generate(model, leaving(ids, 35, 40, seed=2), past_key_values=past)


def test_a_state_that_was_written_to_is_not_saved(loaded):
    model, ids, store = loaded("lfm2"), tokens(75, seed=1), FrameStore()
    with opened(model, store) as prompts:
        past = prompts.prefill(given(ids))
        past.layers[0].conv_states[0].add_(1)
        del past
        prompts.flush()
        assert not store.frames


# ---------------------------------------------------------------------- damaged stores


@pytest.mark.parametrize("tries", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_a_frame_that_is_missing_old_or_damaged_is_never_served(loaded, tries):
    model, store = loaded("lfm3"), FrameStore()  # three groups: full attention, a window, states
    first = tokens(75, seed=1)
    asked = [first, leaving(first, 50, 70, seed=2), leaving(first, 35, 60, seed=3)]
    expected = [generate(model, ids, max_new_tokens=4) for ids in asked]
    rng = random.Random(5)
    torn = 0
    with opened(model, store) as prompts:
        for ids in asked * 2:
            answer(model, prompts, ids, max_new_tokens=4)
        assert prompts.flush()
        whole, store.writable = dict(store.frames), False
        usual = [answer(model, prompts, ids, max_new_tokens=4)[1] for ids in asked]
        assert usual == [(64,), (64,), (48,)]
        for _ in range(tries):
            store.frames = dict(whole)
            key = rng.choice(list(whole))
            match rng.choice(("missing", "old", "damaged")):
                case "missing":
                    del store.frames[key]
                case "old":
                    store.frames[key] = whole[rng.choice([one for one in whole if one != key])]
                case _:
                    bad = whole[key].clone()
                    bad[rng.randrange(64, bad.numel())] ^= 1 + rng.randrange(255)
                    store.frames[key] = bad
            number = rng.randrange(len(asked))
            found, count = answer(model, prompts, asked[number], max_new_tokens=4)
            assert found == expected[number]
            torn += count != usual[number]
    assert torn > tries // 4  # most frames are a part of some prompt


# ---------------------------------------------------------------------- refusals


def test_the_page_has_enough_families():
    assert len(RECURRENT) + len(LATENT) >= 14


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_served_is_refused_by_a_sentence(loaded, family):
    reason = re.escape(ROWS[family].removeprefix("refused: "))
    with pytest.raises(UnsupportedModel, match=reason):
        opened(loaded(family), FrameStore())


@pytest.mark.parametrize("interval", [0, 24, True, 32.0])
def test_an_interval_is_a_multiple_of_the_block_size(loaded, interval):
    with pytest.raises(ConfigurationError, match="state_interval"):
        opened(loaded("lfm2"), FrameStore(), state_interval=interval)
