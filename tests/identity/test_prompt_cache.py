"""Planted identities of `PromptCache`: a model in the caller's hands, and its name."""

from __future__ import annotations

import copy
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from file_plants import alter, flip_byte
from model_changes import (
    Change,
    add_hook,
    attach,
    cast_to_and_fro,
    change_buffer,
    change_setting,
    fused_step,
    load_other,
    merge,
    patch_forward,
    replace_memory,
    write_uncounted,
)
from model_directories import tensors
from model_passes import (
    inner_model,
    inner_model_of_tokens,
    under_autocast,
    unhooked,
    with_4d_mask,
    with_embeddings,
    with_hole,
    with_other_tokens,
    with_positions,
)
from prompts import T, given, opened
from prompts import generate as generated
from prompts import prompt as prompt_of
from rows import cells
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
    dynamic_module_utils,
)

from kvconnect.digest import model_digest
from kvconnect.errors import ConfigurationError, UnsupportedModel, UsageError
from kvconnect.integrations.transformers import PromptCache
from kvconnect.integrations.transformers.cache_effects import refuse_effects_of_cache
from kvconnect.integrations.transformers.identity import LoadedIdentity, identify
from kvconnect.trace import metrics

LENGTH = 40
ALL = LENGTH - 1  # the last token is computed


def load(directory: Path, **more: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(directory, **{"dtype": torch.float64} | more)


prompt = partial(prompt_of, LENGTH)
generate = partial(generated, max_new_tokens=6)


def loaded(model: PreTrainedModel, prompts: PromptCache, ids: Tensor | None = None) -> int:
    """How many tokens were loaded for an answer that is the model's own."""
    ids = prompt() if ids is None else ids
    past = prompts.prefill(given(ids))
    assert generate(model, ids, past_key_values=past) == generate(model, ids)
    return past.loaded_tokens[0] if past.loaded_tokens else 0


def finds(model: PreTrainedModel, store: str, ids: Tensor | None = None, **more: object) -> int:
    with opened(model, store, **more) as prompts:
        return loaded(model, prompts, ids)


def named(model: PreTrainedModel, revision: str | None = None) -> bytes:
    """What stands for the model in keys: others find nothing of what it computes."""
    return identify(model, revision).digest


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps comparisons of earlier runs out of these tests, and theirs out of the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"disk://{tmp_path}/kv?capacity=64MiB"


@pytest.fixture(scope="module")
def llama_directory(model_of: Callable[[str], Path]) -> Path:
    return model_of("llama")


@pytest.fixture(scope="module")
def other_directory(llama_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same configuration and other weights."""
    return with_weights(llama_directory, tmp_path_factory.mktemp("other") / "model", other_weights)


@pytest.fixture
def place(llama_directory: Path, tmp_path: Path) -> Path:
    """A copy of the directory, to be changed."""
    return shutil.copytree(llama_directory, tmp_path / "model")


def other_weights(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.flip(0).contiguous() for name, tensor in found.items()}


def with_weights(
    source: Path, target: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]
) -> Path:
    """A copy of the directory `source` with changed weights."""
    shutil.copytree(source, target)
    file = target / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return target


@pytest.fixture
def model(llama_directory: Path) -> PreTrainedModel:
    """To be changed."""
    return load(llama_directory)


@pytest.fixture
def filled(llama_directory: Path, store: str) -> str:
    """A store with what the unchanged model computed."""
    assert finds(load(llama_directory), store) == 0
    return store


def as_before(directory: Path, store: str) -> None:
    """What was stored under the directory's name is still its own, and found."""
    assert finds(load(directory), store) == ALL


QUICK = {"fused-optimizer", "buffer-changed", "setting-changed", "hook-added", "adapter-attached"}
QUICK |= {"adapter_config.json"}


def thinned(rows: Iterable[str], *quick: str) -> list[object]:
    """`rows` as parameters; all but `QUICK` ones and `quick` are long forms."""
    kept = QUICK.union(quick)
    return [
        pytest.param(row, marks=() if row in kept else pytest.mark.slow) for row in sorted(rows)
    ]


# ---------------------------------------------------------------------- the files of a directory


@pytest.mark.planted("files-alone", "prompt_cache", "hit")
@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("llama", torch.float64),
        ("mixtral", torch.float64),
        ("gemma3", torch.bfloat16),
        ("gpt2", torch.bfloat16),
    ],
)
def test_an_unchanged_model_has_the_name_of_its_directory(model_of, arch, dtype):
    """Renamed, merged, tied and cast weights, and buffers that no file has, are recognised."""
    directory = model_of(arch)
    model = load(directory, dtype=dtype, experts_implementation="eager")
    assert identify(model, None) == LoadedIdentity(model_digest(directory))


@pytest.mark.planted("files-alone", "prompt_cache", "hit")
@pytest.mark.parametrize("shards", [1, 2])
def test_files_that_pytorch_pickled_name_the_model_that_equals_them(place, shards):
    """``tests/digest`` has what their digest was in earlier releases."""
    found = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    whole = ["pytorch_model.bin"]
    names = whole if shards == 1 else [f"pytorch_model-{one}.bin" for one in range(shards)]
    placed = {name: names[at % shards] for at, name in enumerate(found)}
    for file in names:
        torch.save({name: found[name] for name in found if placed[name] == file}, place / file)
    if shards > 1:
        index = json.dumps({"metadata": {}, "weight_map": placed})
        (place / "pytorch_model.bin.index.json").write_text(index)
    torch.save({"a trainer's": 1}, place / "training_args.bin")
    model = load(place)
    assert identify(model, None) == LoadedIdentity(model_digest(place))
    with torch.no_grad():
        model.lm_head.weight[-1, -1] += 1
    assert "lm_head.weight differs from the file" in identify(model, None).own


def name_weights(place: Path, other: Path) -> None:
    shutil.copy(other / "model.safetensors", place / "mine.safetensors")
    alter(place, "config.json", {"transformers_weights": "mine.safetensors"})


PLANTS = cells(
    "prompt_cache",
    "key",
    {
        "other-model": lambda place, other: shutil.copy(other / "model.safetensors", place),
        "weight-byte": lambda place, _: flip_byte(place / "model.safetensors"),
        "config-changed": lambda place, _: alter(place, "config.json", {"rms_norm_eps": 1e-2}),
        "transformers-weights": name_weights,
    },
)


@pytest.mark.parametrize("plant", PLANTS)
def test_a_directory_that_has_changed(llama_directory, other_directory, place, plant):
    before = named(load(place))
    plant(place, other_directory)
    after = [named(load(place)) for _ in range(2)]
    assert after[0] == after[1] != before == named(load(llama_directory))


@pytest.mark.planted("other-window", "prompt_cache", "key")
def test_another_window(model_of, tmp_path):
    place = shutil.copytree(model_of("mistral"), tmp_path / "model")
    before = named(load(place))
    alter(place, "config.json", {"sliding_window": 9})
    assert named(load(place)) != before


@pytest.mark.planted("overridden-configuration", "prompt_cache", "key")
def test_a_setting_that_is_given_while_it_is_loaded(llama_directory, filled):
    rope = {"rope_type": "default", "rope_theta": 77.0}
    for count in (0, ALL):
        assert finds(load(llama_directory, rope_parameters=rope), filled) == count


@pytest.mark.planted("computes-in-other-dtype", "prompt_cache", "key")
def test_another_dtype(llama_directory, filled):
    with opened(load(llama_directory, dtype=torch.float32), filled) as prompts:
        assert prompts.prefill(given(prompt())).loaded_tokens == (0,)


@pytest.mark.planted("index-changed", "prompt_cache", "key")
def test_an_index_that_names_other_files(place):
    found = load_file(place / "model.safetensors")
    save_file(found, place / "one.safetensors", {"format": "pt"})
    save_file(other_weights(found), place / "two.safetensors", {"format": "pt"})
    (place / "model.safetensors").unlink()
    index = place / "model.safetensors.index.json"

    def name_with(file: str) -> bytes:
        weights = dict.fromkeys(found, f"{file}.safetensors")
        index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        return named(load(place))

    names = [name_with(one) for one in ("one", "two", "one", "two")]
    assert names[:2] == names[2:]
    assert names[0] != names[1]


BESIDE = (
    *("model-00001-of-00001.safetensors", "consolidated.safetensors"),
    *("model.pt", "model.gguf", "weights.npz"),
)


@pytest.mark.planted(
    "file-beside-index consolidated-beside-hf pt-beside gguf-beside npz-beside",
    "prompt_cache",
    "key",
)
@pytest.mark.parametrize("name", BESIDE)
def test_weights_that_a_loader_took_from_a_file_beside_the_usual_ones(other_directory, place, name):
    """Whichever loader it was: memory is not what the usual files hold."""
    shutil.copy(other_directory / "model.safetensors", place / name)
    usual, taken = load(place), load(place)
    taken.load_state_dict(load(other_directory).state_dict())
    assert named(usual) == model_digest(place) != named(taken) == named(taken)


@pytest.mark.planted("variant", "subfolder", "bin-beside-safetensors", "prompt_cache", "key")
@pytest.mark.parametrize("how", ["variant", "subfolder", "bin"])
def test_weights_that_transformers_is_told_to_load_instead(other_directory, place, how):
    other = other_directory / "model.safetensors"
    shutil.copy(other, place / "model.fp64.safetensors")
    shutil.copytree(other_directory, place / "sub")
    torch.save(load_file(other), place / "pytorch_model.bin")
    told = {"variant": "fp64"} if how == "variant" else {"subfolder": "sub"}
    told = load(place, **{"use_safetensors": False} if how == "bin" else told)
    assert generate(told, prompt()) == generate(load(other_directory), prompt())
    assert named(load(place)) != named(told) == named(told)


@pytest.mark.planted("params-json quantize-config adapter-in-directory", "prompt_cache", "equal")
@pytest.mark.parametrize(
    "name", thinned(["params.json", "quantize_config.json", "adapter_config.json"])
)
def test_files_that_transformers_does_not_read(store, place, name):
    """`finds` compares the tokens. With peft, an adapter would be attached, which is refused."""
    for dim in (1, 2):
        (place / name).write_text(json.dumps({"lora_alpha": dim}))
        if name.startswith("adapter"):
            (place / "adapter_model.safetensors").write_bytes(tensors("lora_A", seed=dim))
        finds(load(place), store)


@pytest.mark.planted("switched-while-loading", "replaced-after-loading", "prompt_cache", "key")
@pytest.mark.parametrize("by", ["link", "files"])
def test_a_directory_that_is_replaced_once_the_model_is_loaded(
    llama_directory, other_directory, place, tmp_path, by
):
    if by == "link":
        place = tmp_path / "link"
        place.symlink_to(llama_directory)
        model = load(place)
        place.unlink()
        place.symlink_to(other_directory)
    else:
        model = load(place)
        # The old file stays mapped by the model.
        (place / "model.safetensors").unlink()
        shutil.copy(other_directory / "model.safetensors", place)
    assert named(model) == named(model) != named(load(other_directory))


# ---------------------------------------------------------------------- what is in memory


def change_number(model: PreTrainedModel, rng: random.Random) -> None:
    """Only a canary sees it."""
    model.model.layers[0].self_attn.k_proj.weight.data[3, 5] += 0.5


def replace_class(model: PreTrainedModel, rng: random.Random) -> None:
    class Halved(type(model.model.layers[0].mlp)):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) / 2

    model.model.layers[0].mlp.__class__ = Halved


def round_weights(model: PreTrainedModel, rng: random.Random) -> None:
    """As quantisation does, without its package."""
    with torch.no_grad():
        for one in model.parameters():
            one.copy_((one * 8).round() / 8)


def quantise(model: PreTrainedModel, rng: random.Random) -> None:
    class QuantLinear(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            return nn.functional.linear(given, (self.weight * 4).round() / 4)

    model.model.layers[0].self_attn.q_proj.__class__ = QuantLinear


def change_configuration(model: PreTrainedModel, rng: random.Random) -> None:
    change_setting(model, rng)
    model.config.attention_bias = True


def assign_other(model: PreTrainedModel, rng: random.Random) -> None:
    model.load_state_dict({n: 1.2 * one for n, one in model.state_dict().items()}, assign=True)


def resize(model: PreTrainedModel, rng: random.Random) -> None:
    torch.manual_seed(5)
    model.resize_token_embeddings(model.config.vocab_size + 8)


CHANGES: dict[str, Change] = {
    "merged-adapter": merge,
    "cast-to-and-fro": cast_to_and_fro,
    "quantization": round_weights,
    "buffer-changed": change_buffer,
    "setting-changed": change_configuration,
    "embeddings-resized": resize,
    "fused-optimizer": fused_step,
    "uncounted-write": write_uncounted,
    "one-number": change_number,
    "storage-replaced": replace_memory,
    "weights-updated": load_other,
    "weights-reloaded": assign_other,
    "hook-added": add_hook,
    "forward-patched": patch_forward,
    "class-replaced": replace_class,
    "adapter-attached": attach,
    "quantised-in-memory": quantise,
}


def change(model: PreTrainedModel, row: str) -> None:
    CHANGES[row](model, random.Random(row))


CODE = {
    row for row in CHANGES if row.startswith(("hook", "forward", "class", "adapter", "quantised"))
}


@pytest.mark.planted(
    "merged-adapter cast-to-and-fro quantization buffer-changed setting-changed",
    "embeddings-resized",
    "prompt_cache",
    "key",
)
@pytest.mark.parametrize("row", sorted(CHANGES.keys() - CODE))
def test_what_changed_before_the_cache_was_made_has_a_name_of_its_own(llama_directory, model, row):
    change(model, row)
    assert named(model) == named(model) != named(load(llama_directory))


@pytest.mark.planted(
    "hook-added forward-patched adapter-switched quantised-in-memory", "prompt_cache", "refused"
)
@pytest.mark.parametrize("row", thinned(CODE, "forward-patched"))
def test_code_that_no_digest_covers_needs_a_name(llama_directory, model, filled, row):
    change(model, row)
    with pytest.raises(UnsupportedModel, match="give model_revision"):
        opened(model, filled)
    for count in (0, ALL):
        assert finds(model, filled, model_revision="mine@1") == count


@pytest.mark.planted("forward-patched", "prompt_cache", "refused")
def test_code_in_the_model_s_directory_needs_a_name(store, place, tmp_path, monkeypatch):
    """A class of its own may compute anything, also with the forward of transformers' class."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    (place / "modeling_mine.py").write_text(
        "from transformers import LlamaForCausalLM\nclass Mine(LlamaForCausalLM): pass\n"
    )
    alter(place, "config.json", {"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}})
    model = load(place, trust_remote_code=True)
    with pytest.raises(UnsupportedModel, match=r"the model is a transformers_modules\..*Mine"):
        opened(model, store)
    for count in (0, ALL):
        assert finds(model, store, model_revision="mine@1") == count


@pytest.mark.planted("weights-from-elsewhere", "prompt_cache", "key")
def test_random_weights_under_the_name_of_a_directory(llama_directory, model):
    torch.manual_seed(7)
    dummy = AutoModelForCausalLM.from_config(model.config, dtype=torch.float64).eval()
    dummy.config.name_or_path = dummy.name_or_path = str(llama_directory)
    assert named(dummy) == named(dummy) != named(model)


@pytest.mark.planted("weights-not-stored", "prompt_cache", "key")
def test_layers_that_the_files_lack_are_named_by_what_they_were_initialised_with(
    llama_directory, tmp_path
):
    def without_last(found: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: one for name, one in found.items() if ".layers.2.self_attn" not in name}

    place = with_weights(llama_directory, tmp_path / "model", without_last)
    names = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        names.add(named(load(place)))
    assert len(names) == 2


@pytest.mark.planted("same-revision", "prompt_cache", "key")
@pytest.mark.parametrize("how", ["given", "setting-changed", "buffer-changed"])
def test_settings_beside_a_promised_revision(llama_directory, model, how):
    rope = {"rope_type": "default", "rope_theta": 77.0}
    other = load(llama_directory, **{"rope_parameters": rope} if how == "given" else {})
    if how != "given":
        change(other, how)
    usual = [named(one, "mine@1") for one in (model, load(llama_directory))]
    assert usual[0] == usual[1] != named(other, "mine@1") == named(other, "mine@1")


@pytest.mark.planted("other-block-size", "prompt_cache", "key")
def test_another_block_size(model, filled):
    assert finds(model, filled, tokens_per_block=8) == 0


# ---------------------------------------------------------------------- changes while it is used


def uncached() -> dict[str, float]:
    """Counts of what was not cached, by reason."""
    return {
        dict(labels)["reason"]: found["engine.request.uncached"]
        for labels, found in metrics.by_labels().items()
        if "engine.request.uncached" in found and "reason" in dict(labels)
    }


@contextmanager
def counted_by_reason() -> Iterator[None]:
    before = uncached()
    yield
    assert uncached() != before


@pytest.mark.planted(
    "fused-optimizer uncounted-write storage-replaced weights-updated weights-reloaded",
    "changed-between-generates",
    "prompt_cache",
    "refused",
)
@pytest.mark.parametrize(
    "row", thinned(CHANGES, "one-number", "storage-replaced", "weights-updated")
)
def test_what_changes_between_two_generates_ends_the_cache(llama_directory, model, store, row):
    other = prompt(seed=2)
    with opened(model, store) as prompts:
        assert loaded(model, prompts) == 0
        assert prompts.flush()
        change(model, row)
        with counted_by_reason():
            past = prompts.prefill(given(prompt()))
        assert past.not_cached
        assert generate(model, prompt(), past_key_values=past) == generate(model, prompt())
        assert loaded(model, prompts, other) == 0
        assert prompts.prefill(given(other)).loaded_tokens == ()
    as_before(llama_directory, store)
    assert finds(load(llama_directory), store, other) == 0


@pytest.mark.planted("changed-before-generate", "prompt_cache", "refused")
@pytest.mark.parametrize(
    ("row", "restored"),
    [
        pytest.param(row, restored, marks=() if row in quick else pytest.mark.slow)
        for restored, quick in ((True, QUICK), (False, {"hook-added"}))
        for row in sorted(CHANGES.keys() - {"embeddings-resized", "one-number"})
    ],
)
def test_what_changes_between_prefill_and_generate(llama_directory, model, store, row, restored):
    """What was loaded is not used, and what is computed is not saved."""
    ids = prompt()
    if restored:
        assert finds(load(llama_directory), store) == 0
    with opened(model, store) as prompts:
        past = prompts.prefill(given(ids))
        assert past.loaded_tokens == (ALL * restored,)
        change(model, row)
        if restored:
            with pytest.raises(UsageError, match=r"call prefill\(\)"):
                generate(model, ids, past_key_values=past)
        else:
            assert generate(model, ids, past_key_values=past) == generate(model, ids)
        del past
        prompts.flush()
    assert finds(load(llama_directory), store) == ALL * restored


@pytest.mark.parametrize(
    "row", ["fused-optimizer", pytest.param("hook-added", marks=pytest.mark.slow)]
)
def test_what_was_computed_before_a_change_was_noticed_is_not_saved(
    llama_directory, model, store, row
):
    """Also not what came before it: no check tells when it was."""
    with opened(model, store) as prompts:
        past = prompts.prefill(given(prompt()))
        generate(model, prompt(), past_key_values=past)
        change(model, row)
        del past
        with counted_by_reason():
            assert prompts.flush()
    assert finds(load(llama_directory), store) == 0


def test_what_was_loaded_before_a_change_was_noticed_is_not_used(llama_directory, model, store):
    """The change is one that only a canary sees; another prompt's check disowned this one."""
    assert finds(load(llama_directory), store) == 0
    with opened(model, store) as prompts:
        past = prompts.prefill(given(prompt()))
        assert past.loaded_tokens == (ALL,)
        change(model, "one-number")
        assert "no longer computes" in prompts.prefill(given(prompt(seed=2))).not_cached
        with pytest.raises(UsageError, match=r"call prefill\(\)"):
            generate(model, prompt(), past_key_values=past)


def test_a_model_that_does_not_compute_the_same_twice_is_not_cached(model, store):
    noise = iter(range(1, 10**6))
    handle = model.model.layers[0].register_forward_hook(
        lambda *given: given[-1] * (1 + next(noise) / 1e6)
    )
    with opened(model, store, model_revision="noisy@1") as prompts:
        assert "does not compute the same twice" in prompts.prefill(given(prompt())).not_cached
    handle.remove()


def test_what_is_computed_once_a_check_has_begun_waits_for_the_next_one(model, store):
    ids = prompt_of(4 * T)
    with opened(model, store) as prompts:
        past = prompts.prefill(given(ids))
        full(model, past, ids[:, : 2 * T])
        assert past.mark()
        full(model, past, ids[:, 2 * T :])
        past.vouch()
        past.save(whole=True)
        change(model, "one-number")
        del past
        assert prompts.flush()
    model = load(Path(model.name_or_path))
    with opened(model, store) as prompts:
        assert prompts.prefill(given(ids)).loaded_tokens == (2 * T,)


@pytest.mark.planted("training-mode", "prompt_cache", "refused")
def test_training_mode(llama_directory, store):
    model = load(llama_directory, attention_dropout=0.5)
    with opened(model, store) as prompts:
        assert loaded(model, prompts) == 0
        assert prompts.flush()
        model.train()
        assert "training mode" in prompts.prefill(given(prompt(seed=2))).not_cached
    with opened(model, store) as prompts:  # made in that mode
        assert "training mode" in prompts.prefill(given(prompt())).not_cached
        model.eval()
        assert "another PromptCache" in prompts.prefill(given(prompt())).not_cached
    assert finds(model, store) == ALL


@pytest.mark.planted("adapter-weights-changed", "prompt_cache", "refused")
@pytest.mark.parametrize("how", ["weights", "switched"])
def test_an_adapter_under_a_promised_name(model, store, how):
    adapter = attach(model, random.Random(1))
    with opened(model, store, model_revision="mine+adapter@1") as prompts:
        assert loaded(model, prompts) == 0
        assert prompts.flush()
        if how == "weights":
            adapter.added.data.mul_(2)
        else:
            adapter.on = False
        assert prompts.prefill(given(prompt())).not_cached
        if how == "switched":
            adapter.on = True
            assert prompts.prefill(given(prompt())).not_cached  # once is enough
    if how == "switched":
        assert finds(model, store, model_revision="mine+adapter@1") == ALL


def test_a_switch_for_the_time_of_one_generate_is_noticed(model, store):
    """No check sees it: before and after the model is what it was."""
    adapter = attach(model, random.Random(1))
    with opened(model, store, model_revision="mine@1") as prompts:
        past = prompts.prefill(given(prompt()))
        adapter.on = False
        generate(model, prompt(), past_key_values=past)
        adapter.on = True
        del past
        assert prompts.flush()
        assert loaded(model, prompts) == 0


@pytest.mark.planted("other-adapter", "no-adapter", "prompt_cache", "key")
def test_adapters_are_apart_by_the_names_that_they_were_given(llama_directory, model, filled):
    adapted = load(llama_directory)
    attach(adapted, random.Random(1))
    names = {named(adapted, f"mine+adapter@{number}") for number in (1, 2)}
    assert len(names | {named(model)}) == 3
    assert finds(adapted, filled, model_revision="mine+adapter@1") == 0
    assert finds(model, filled) == ALL


@pytest.mark.planted("paused", "prompt_cache", "hit")
def test_what_changes_nothing_keeps_the_cache(model, store):
    with opened(model, store) as prompts:
        loaded(model, prompts)
        assert prompts.flush()
        model.train()
        model.eval()
        model.to("cpu").requires_grad_(requires_grad=False)
        model.model.layers[0].register_forward_hook(lambda *_: None)
        for _ in range(2):
            assert loaded(model, prompts) == ALL


# ---------------------------------------------------------------------- what no canary is long for


def narrow(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **more: Any
) -> tuple[Tensor, None]:
    """Attention to the last 20 tokens: as usual for a canary's 16."""
    key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    at = torch.arange(key.shape[2])
    ends = at[-query.shape[2] :, None]
    found = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=(at <= ends) & (at > ends - 20), scale=more["scaling"]
    )
    return found.transpose(1, 2).contiguous(), None


@pytest.fixture
def own_attention(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(AttentionInterface._global_mapping, "narrow", narrow)
    return "narrow"


def narrow_attention(model: PreTrainedModel) -> None:
    model.set_attn_implementation("narrow")


def narrow_table(model: PreTrainedModel) -> None:
    AttentionInterface._global_mapping[model.config._attn_implementation] = narrow


def narrow_config(model: PreTrainedModel) -> None:
    model.model.config = copy.deepcopy(model.config)
    model.model.config.sliding_window = 20


def narrow_attribute(model: PreTrainedModel) -> None:
    """Flash attention reads it."""
    for layer in model.model.layers:
        layer.self_attn.sliding_window = 20


@pytest.mark.planted("setting-changed forward-patched", "prompt_cache", "refused")
@pytest.mark.parametrize("alter", [narrow_attention, narrow_table, narrow_config, narrow_attribute])
@pytest.mark.usefixtures("own_attention")
def test_what_shows_behind_a_canary_ends_the_cache(store, monkeypatch, alter):
    kind = {"num_key_value_heads": 2, "sliding_window": 32, "use_sliding_window": True}
    model = small("Qwen2ForCausalLM", max_window_layers=0, **kind)
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", AttentionInterface()["sdpa"])
    with opened(model, store) as prompts:
        for count in (0, ALL):
            assert loaded(model, prompts) == count
        assert prompts.flush()
        alter(model)
        with counted_by_reason():
            past = prompts.prefill(given(prompt()))
        assert past.not_cached
        assert generate(model, prompt(), past_key_values=past) == generate(model, prompt())


@pytest.mark.planted("forward-patched", "prompt_cache", "refused")
def test_attention_of_the_callers_needs_a_name(model, filled, own_attention):
    model.set_attn_implementation(own_attention)
    with pytest.raises(UnsupportedModel, match=r"'narrow' is \S+\.narrow,"):
        PromptCache(model, filled)
    assert finds(model, filled, model_revision="mine+narrow@1") == 0
    assert finds(model, filled, model_revision="mine+narrow@1") == ALL


@pytest.mark.planted("forward-patched", "prompt_cache", "refused")
def test_a_replaced_function_of_the_models_file_needs_a_name(model, filled, monkeypatch):
    monkeypatch.setattr(sys.modules[type(model).__module__], "rotate_half", lambda one: -one)
    with pytest.raises(UnsupportedModel, match="rotate_half of"):
        PromptCache(model, filled)


# ---------------------------------------------------------------------- passes


def full(model: PreTrainedModel, past: object, ids: Tensor, **more: object) -> None:
    model(ids, past_key_values=past, use_cache=True, **more)


@pytest.mark.planted(
    "inner-model-called mask-4d embeddings-given prompt-embeddings", "prompt_cache", "refused"
)
@pytest.mark.parametrize(
    "compute",
    [
        *(inner_model, inner_model_of_tokens, unhooked, with_4d_mask, with_positions),
        *(with_embeddings, with_other_tokens, with_hole, under_autocast),
    ],
)
@pytest.mark.parametrize("later", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_other_passes_compute_is_not_saved(model, store, compute, later):
    """Of a second pass: what the first computed is saved, and nothing behind it."""
    ids = prompt_of(5 * T, seed=3)
    with opened(model, store) as prompts:
        past = prompts.prefill(given(ids))
        if later:
            full(model, past, ids[:, : 2 * T])
        compute(model, ids, past)
        del past
        assert prompts.flush()
        assert prompts.prefill(given(ids)).loaded_tokens == (2 * T if later else 0,)


@pytest.mark.planted("mask-of-later-pass", "positions-of-later-pass", "prompt_cache", "refused")
@pytest.mark.parametrize("how", ["mask", "positions"])
def test_later_steps_with_masks_and_positions_of_their_own(model, store, how):
    ids = prompt_of(5 * T, seed=4)
    with opened(model, store) as prompts:
        past = prompts.prefill(given(ids))
        full(model, past, ids[:, : 2 * T])
        for at in range(2 * T, 4 * T):
            more: dict[str, Tensor] = {"attention_mask": torch.ones(1, at + 1, dtype=torch.int64)}
            if at >= 3 * T and how == "mask":
                more["attention_mask"][:, 3] = 0
            if at >= 3 * T and how == "positions":
                more["position_ids"] = torch.tensor([[at + 7]])
            full(model, past, ids[:, at : at + 1], **more)
        del past
        assert prompts.flush()
        assert prompts.prefill(given(ids)).loaded_tokens == (3 * T,)


@pytest.mark.planted("cropped", "prompt_cache", "key")
def test_a_cache_that_is_cropped_is_saved_by_what_it_then_computes(model, store):
    ids, other = prompt_of(4 * T, seed=5), prompt_of(4 * T, seed=6)
    with opened(model, store) as prompts:
        past = prompts.prefill(given(ids))
        full(model, past, ids[:, : 3 * T])
        past.crop(-T)
        full(model, past, other[:, 2 * T :])
        del past
        assert prompts.flush()
        mixed = torch.cat([ids[:, : 2 * T], other[:, 2 * T :]], dim=1)
        assert prompts.prefill(given(ids)).loaded_tokens == (2 * T,)
        assert loaded(model, prompts, mixed) == 4 * T - 1


@pytest.mark.planted("foreign-pass", "prompt_cache", "refused")
@pytest.mark.parametrize("how", ["pass", "pass and crop", "tensor", "in place"])
def test_what_others_write_into_a_cache(llama_directory, other_directory, store, how):
    model, other = load(llama_directory), load(other_directory)
    ids = prompt_of(5 * T, seed=7)
    with opened(model, store) as prompts:
        past = prompts.prefill(given(ids))
        full(model, past, ids[:, : 2 * T])
        if how.startswith("pass"):
            if "crop" in how:
                past.crop(-T)
            full(other, past, ids[:, T if "crop" in how else 2 * T : 3 * T])
        elif how == "tensor":
            past.layers[0].keys = past.layers[0].keys * 2
        else:
            past.layers[0].keys.mul_(2)
        full(model, past, ids[:, past.get_seq_length() :])
        del past
        assert prompts.flush()
        count = {"pass": 2 * T, "pass and crop": T}.get(how, 0)
        assert prompts.prefill(given(ids)).loaded_tokens == (count,)


# ---------------------------------------------------------------------- models that a cache changes


def small(name: str, **more: object) -> PreTrainedModel:
    """A random model of transformers' class `name`."""
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    common = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2} | {
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    made = kind(kind.config_class(**common | more)).double().eval()
    for one in made.parameters():
        if one.ndim > 1:
            nn.init.normal_(one, std=0.3)
    return made


CHANGED = [
    ("Gemma3ForCausalLM", "bidirectional", "looks ahead"),
    ("BertLMHeadModel", "bidirectional", "computes otherwise with a cache"),
    ("MoshiForCausalLM", "several attention windows", "not passed"),
]
SETTINGS = {
    "Gemma3ForCausalLM": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "use_bidirectional_attention": True,
    },
    "MoshiForCausalLM": {"num_key_value_heads": 4, "sliding_window": 12, "ffn_dim": 128},
    "MptForCausalLM": {"d_model": 64, "n_heads": 4, "n_layers": 2},
}


@pytest.mark.planted(
    "bidirectional encoder-as-decoder window-not-passed alibi-by-length", "prompt_cache", "refused"
)
@pytest.mark.parametrize(
    ("name", "declared", "computed"),
    [*CHANGED, ("MptForCausalLM", "length of the cache", None)],
)
def test_models_that_a_cache_changes_are_refused(name, declared, computed):
    """By what they declare, as in the engine; and by what they compute, whatever they declare."""
    model = small(name, **SETTINGS.get(name, {}))
    with pytest.raises(UnsupportedModel, match=declared):
        PromptCache(model, "memory:")
    if computed is not None:
        with pytest.raises(UnsupportedModel, match=computed):
            refuse_effects_of_cache(model, has_windows=True)


@pytest.mark.parametrize("name", ["Starcoder2ForCausalLM", "Cohere2ForCausalLM"])
def test_models_that_pass_their_window_on_are_served(name, store):
    model = small(name, num_key_value_heads=2, sliding_window=12)
    for count in (0, ALL):
        assert finds(model, store) == count


@pytest.mark.planted("dynamic-rope", "long-factors", "prompt_cache", "refused")
@pytest.mark.parametrize(("kind", "longest"), [("dynamic", 63), ("longrope", 64)])
def test_prompts_of_the_length_where_rope_turns(llama_directory, store, kind, longest):
    rope: dict[str, object] = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
        rope["original_max_position_embeddings"] = 64
    length = 64 if kind == "dynamic" else 128
    model = load(llama_directory, rope_parameters=rope, max_position_embeddings=length)
    turning, ids = prompt_of(longest + 1), prompt_of(longest)
    with opened(model, store) as prompts:
        for _ in range(2):
            past = prompts.prefill(given(turning))
            assert f"over {longest} tokens" in past.not_cached
            assert generate(model, turning, past_key_values=past, max_new_tokens=3)
        for count in (0, longest - 1):
            past = prompts.prefill(given(ids))
            assert past.loaded_tokens == (count,)
            full(model, past, ids[:, count:])
            del past
            assert prompts.flush()


# ---------------------------------------------------------------------- what comes with a prompt


@pytest.mark.planted("other-picture picture-settings sound-or-video", "prompt_cache", "refused")
@pytest.mark.parametrize("name", ["pixel_values", "input_features", "inputs_embeds"])
def test_inputs_beside_tokens(model, store, name):
    with opened(model, store) as prompts, counted_by_reason():
        past = prompts.prefill(given(prompt()) | {name: torch.ones(1, 3)})
    assert name in past.not_cached


@pytest.mark.planted("other-salt", "long-salt", "prompt_cache", "key")
def test_salts_that_begin_alike(model, store):
    salts = ["a", "b", "a" * 1000, "a" * 999 + "b"]
    with opened(model, store) as prompts:
        for salt in salts:
            past = prompts.prefill(given(prompt()), cache_salt=salt)
            assert past.loaded_tokens == (0,)
            generate(model, prompt(), past_key_values=past)
            del past
            assert prompts.flush()
        with pytest.raises((ConfigurationError, ValueError), match="salt"):
            prompts.prefill(given(prompt()), cache_salt="")
