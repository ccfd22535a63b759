"""A model in parts computes what it computes whole: the ranks are threads, without a cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_tiny
from observed import slow
from torch import Tensor
from transformers import AutoModelForCausalLM

from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.engine.model import mixer_division
from kvconnect.engine.model import model as model_module
from kvconnect.engine.model.mixer_probe import CHUNKS
from kvconnect.engine.model.model import Model, check_sharing
from kvconnect.engine.model.scores import AttentionInput
from kvconnect.engine.model.sharding import Division
from kvconnect.engine.model.state_memory import StateMemory
from kvconnect.errors import UnsupportedModel

LESS_OFTEN = ["qwen2", "qwen3", "mistral", "phi", "gemma", "olmo"]
ARCHITECTURES = [
    *("llama", "gemma3", "mixtral", "gpt_neox", "deepseek_v3"),
    *slow(*LESS_OFTEN),
]
RECURRENT = [
    *("qwen3_next", "falcon_h1", "lfm2", "nemotron_h"),
    *slow("bailing_hybrid", "bamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2_moe"),
    *slow("lfm3", "minimax", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text"),
]

WHOLE = {"bamba", "granitemoehybrid", "jamba", "minimax", "nemotron_h"}
"""Norms over all heads, and Mamba 1, whose time steps are sums over all channels."""


class Rank:
    """One of several threads. Sums are none until all have their part of the model."""

    def __init__(self, rank: int, meeting: threading.Barrier, parts: list[Tensor | None]) -> None:
        self.rank, self.size = rank, meeting.parties
        self._meeting, self._parts = meeting, parts
        self.sums = False

    def all_reduce(self, tensor: Tensor) -> None:
        if self.sums:
            self._parts[self.rank] = tensor.clone()
            self._meeting.wait()
            tensor.copy_(sum(self._parts))
            self._meeting.wait()


class Uncached:
    """A step of one prompt that attends to what it was given."""

    states = None

    def __init__(self, prompt: Sequence[int]) -> None:
        self.input_ids = torch.tensor([prompt])
        self.position_ids = torch.arange(len(prompt))[None]
        self.last_tokens = torch.tensor([len(prompt) - 1])

    def attend(self, layer_idx: int, given: AttentionInput) -> Tensor:
        key, value = given.key, given.value
        if given.latents is not None:
            key, value = (one[None] for one in given.latents.expanded(key[0]))
        groups = given.query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(
            given.query, key, value, is_causal=True, scale=given.scaling
        )
        return attended.transpose(1, 2)[..., : given.value_dim]

    def check_complete(self) -> None:
        """The models of this file have no other way."""


PROMPT = list(range(7, 27))


def parts(directory, size: int) -> tuple[list[Model], list[Rank]]:
    meeting, sums = threading.Barrier(size, timeout=60), [None] * size
    ranks = [Rank(rank, meeting, sums) for rank in range(size)]
    models = [Model(directory, dtype="float64", device="cpu", ranks=rank) for rank in ranks]
    for rank in ranks:
        rank.sums = True
    return models, ranks


@pytest.fixture(autouse=True)
def _whole_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lean layers ask for the last tokens alone, which `Uncached` does not know.
    monkeypatch.setattr(model_module, "make_lean", lambda _: 0)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_logits_are_those_of_one_rank(arch, size, model_of):
    check_equal(model_of(arch), size)


def check_equal(directory: Path, size: int, *, within: float = 1e-12) -> list[Model]:
    whole = Model(directory, dtype="float64", device="cpu")
    expected = whole.forward(Uncached(PROMPT))
    models, _ = parts(directory, size)
    with ThreadPoolExecutor(size) as pool:
        logits = list(pool.map(lambda one: one.forward(Uncached(PROMPT)), models))
    torch.testing.assert_close(logits[0], expected, rtol=0, atol=within)
    assert [len(one) for one in logits] == [1] + [0] * (size - 1)  # the leader samples
    assert all(one.layers == models[0].layers for one in models)
    assert all(one.whole_layers == whole.layers for one in models)
    assert all(one.states == whole.states for one in models)
    return models


@pytest.mark.parametrize("family", RECURRENT)
def test_ranks_divide_recurrent_layers_where_the_mixer_allows_it(family, tiny):
    """The states are those of one rank; each rank has its heads or channels of them."""
    models = check_equal(tiny(family), 2, within=1e-5)  # some round states to float32
    sizes = [sum(one.numel() for one in model._model.parameters()) for model in models]
    assert (
        sizes[0] == sizes[1] < AutoModelForCausalLM.from_pretrained(tiny(family)).num_parameters()
    )
    assert halved(models) == (family not in WHOLE)


@pytest.mark.parametrize(
    ("family", "fields", "size", "divided"),
    [
        ("nemotron_h", {"n_groups": 2}, 2, True),
        ("falcon_h1", {"mamba_rms_norm": True}, 2, False),
        ("falcon_h1", {"mamba_proj_bias": True, "projectors_bias": True}, 2, True),
        *slow(
            ("nemotron_h", {"n_groups": 2}, 4, False),
            ("nemotron_h", {"n_groups": 4}, 4, True),
            ("bamba", {"mamba_n_groups": 2}, 2, True),
            ("granitemoehybrid", {"mamba_n_groups": 2}, 2, True),
            ("falcon_h1", {"mamba_rms_norm": True, "mamba_n_groups": 2}, 2, True),
            ("falcon_h1", {"mamba_n_groups": 2}, 4, True),
            ("qwen3_next", {"linear_num_key_heads": 4}, 2, True),
        ),
    ],
)
def test_a_norm_over_heads_of_several_ranks_keeps_a_mixer_whole(
    family, fields, size, divided, tmp_path
):
    models = check_equal(write_tiny(tmp_path, family, **fields), size, within=1e-5)
    assert halved(models) == divided


def halved(models: Sequence[Model]) -> bool:
    """Returns whether each rank has equal parts of all recurrent states; otherwise it has all."""
    states = models[0].states
    if models[0].divided_states is None:
        assert all(one.divided_states is None for one in models)
        return False
    for model in models:
        memory = StateMemory.of(model, 3, None)
        for one in states:
            shape = memory.slots[one.key].shape[1:]
            assert shape[1:] == one.shape[1:]
            if one.key.kind == "recurrent":
                assert shape[0] * len(models) == one.shape[0]
            else:
                assert shape[0] < one.shape[0]
    return True


@pytest.mark.parametrize("size", [2, 4])
def test_a_snapshot_has_the_states_of_all_ranks(size, tiny):
    """With four ranks each of the two key heads is on two of them."""
    models, ranks = parts(tiny("qwen3_next"), size)
    for one in models[0].states:
        rows = [model.divided_states.rows[one.key] for model in models]
        owned = torch.cat([found.rows[found.own] for found in rows])
        assert owned.sort().values.tolist() == list(range(one.shape[0]))
        if one.key.kind == "conv":
            assert sum(len(found.rows) for found in rows) == (128 if size == 2 else 192)

    whole = {one.key: torch.randn(one.shape).to(one.dtype) for one in models[0].states}
    other = next(iter(whole))
    for model in models:
        del model.divided_states.rows[other]  # as of a mixer that every rank computes whole
    found = [{key: torch.full_like(one, 7) for key, one in whole.items()} for _ in ranks]

    def gather(rank: int) -> None:
        divided = models[rank].divided_states
        divided.gather(divided.part(whole), found[rank])

    with ThreadPoolExecutor(size) as pool:
        list(pool.map(gather, range(size)))
    for states in found:
        assert all(torch.equal(states[key], one) for key, one in whole.items())


@pytest.mark.parametrize("wrong", ["heads", "elements", "states", "outputs", "shapes", "chunks"])
def test_a_mixer_whose_parts_compute_something_else_stays_whole(wrong, tiny, monkeypatch):
    needed, rows, cut = mixer_division._needed, mixer_division._Trial.rows, mixer_division._cut
    run = mixer_division.run_in_parts

    def refuse_chunks_of_a_part(mixer: Any, call: Any, shapes: Any, ends: Sequence[int]) -> Any:
        if tuple(ends) == CHUNKS and mixer.num_v_heads < 4:
            raise RuntimeError
        return run(mixer, call, shapes, ends)

    def reversed_elements(gradient: Tensor) -> Any:
        found = needed(gradient)
        return found and found._replace(indices=found.indices.flip(0))

    def cut_twice_as_large(mixer: Any, last: str, *args: Any) -> bool:
        done = cut(mixer, last, *args)
        mixer.get_submodule(last).weight.data *= 2
        return done

    if wrong == "heads":  # counted by attributes of other names
        monkeypatch.setattr(mixer_division, "_COUNTS", {})
    elif wrong == "elements":
        monkeypatch.setattr(mixer_division, "_needed", reversed_elements)
    elif wrong == "outputs":
        monkeypatch.setattr(mixer_division, "_cut", cut_twice_as_large)
    elif wrong == "shapes":  # which the mixer checks by itself
        monkeypatch.setattr(mixer_division, "_cut", raises(ValueError))
    elif wrong == "chunks":  # heads are counted elsewhere for several tokens behind a state
        monkeypatch.setattr(mixer_division, "run_in_parts", refuse_chunks_of_a_part)
    else:
        monkeypatch.setattr(mixer_division._Trial, "rows", lambda *args: rows(*args).flip(0))
    assert not halved(check_equal(tiny("qwen3_next"), 2))


def test_a_rank_without_memory_for_the_trial_does_not_load(tiny, monkeypatch):
    """The other ranks may have divided the mixers."""
    monkeypatch.setattr(mixer_division, "run_in_parts", raises(torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        parts(tiny("qwen3_next"), 2)


def raises(error: type[Exception]) -> Callable[..., Any]:
    def function(*_: Any, **__: Any) -> Any:
        raise error

    return function


def test_a_plan_that_divides_a_recurrent_layer_is_refused():
    mixer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    other = torch.nn.Linear(2, 2)
    for inside in (mixer[0], mixer[0].weight):
        Division(parts={"mlp": inside}).check_whole([other])
        with pytest.raises(UnsupportedModel, match=r"divides conv\.in_proj, a part of a recurrent"):
            Division(parts={"mlp": torch.nn.Linear(2, 2), "conv.in_proj": inside}).check_whole(
                [other, mixer]
            )


def test_a_model_of_recurrent_layers_alone_has_nothing_to_divide(tiny):
    with pytest.raises(UnsupportedModel, match="Mamba2ForCausalLM has no tensor-parallel plan"):
        check_sharing(tiny("mamba2"), 2)


@pytest.mark.parametrize(("arch", "size", "heads"), [("gpt_neox", 4, 1), ("llama", 2, 1)])
def test_each_rank_keeps_its_share_of_the_kv_heads(arch, size, heads, model_of):
    models, _ = parts(model_of(arch), size)
    assert [{layer.num_kv_heads for layer in one.layers} for one in models] == [{heads}] * size


def test_fewer_kv_heads_than_ranks_are_held_by_several(model_of):
    models, _ = parts(model_of("llama"), 4)  # two KV heads
    keys = [one._model.model.layers[0].self_attn.k_proj.weight for one in models]
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(keys[2], keys[3])
    assert not torch.equal(keys[0], keys[2])


@pytest.mark.parametrize(
    ("arch", "size", "reason"),
    [
        ("gpt2", 2, "GPT2LMHeadModel has no tensor-parallel plan"),
        ("llama", 3, r"3 ranks cannot share 4 attention heads .*; sizes that work: 1, 2, 4$"),
        ("gpt_neox", 8, r"8 ranks cannot share 4 attention heads .*; sizes that work: 1, 2, 4$"),
        ("deepseek_v3", 3, r"3 ranks cannot share .*; sizes that work: 1, 2, 4, 8"),
    ],
)
def test_what_cannot_be_divided_is_refused(arch, size, reason, model_of):
    with pytest.raises(UnsupportedModel, match=reason):
        parts(model_of(arch), size)
    with pytest.raises(UnsupportedModel, match=reason):
        check_sharing(model_of(arch), size)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_configuration_alone_tells_that_a_size_works(arch, model_of):
    for size in (1, 2, 4):
        check_sharing(model_of(arch), size)


def test_kv_heads_that_ranks_can_neither_share_nor_repeat_are_refused(tmp_path):
    directory = make_model(tmp_path, num_heads=12, num_kv_heads=3, hidden_size=96, num_layers=1)
    reason = "4 ranks cannot share 3 KV heads .*; sizes that work: 1$"
    with pytest.raises(UnsupportedModel, match=reason):
        parts(directory, 4)
