"""Planted identities in our own engine: what differs has another key, or is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from file_plants import alter, file_plants
from rows import cells
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.engine.checkpoint.loading import load_model
from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.engine.model.declared import checked_windows
from kvconnect.errors import ConfigurationError, UnsupportedModel

PROMPT = list(range(1, 71))
FULL = len(PROMPT) - 1  # the last token is always computed


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("plain") / "model", "llama")


@pytest.fixture
def model(plain: Path, tmp_path: Path) -> Path:
    return shutil.copytree(plain, tmp_path / "model")


def digest(directory: Path, **how: Any) -> bytes:
    """What stands for the loaded model in the engine's keys."""
    return load_model(directory, dtype="float64", device="cpu", **how).digest


def answer(directory: Path, store: Path, *, computes: str = "float64", **cache: Any) -> Any:
    """The first output for `PROMPT`, of an engine of its own on `store`."""
    config = KvCacheConfig(**{"max_tokens": 512, "tokens_per_block": 16} | cache)
    connector = KvCacheConnectorConfig(
        url=f"disk://{store}?capacity=64MiB", lookup_timeout_ms=60_000, overlap_loads=False
    )
    with LLM(directory, kv_cache=config, connector=connector, dtype=computes, device="cpu") as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=4, ignore_eos=True))[0]


# ------------------------------------------------------------------------------------- files


def other_model(model: Path, number: int) -> None:
    shutil.rmtree(model)
    make_model(model, "llama", seed=number)


def flip(model: Path, number: int) -> None:
    path = model / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-number] ^= 1
    path.write_bytes(data)


def named_weights(model: Path, number: int) -> None:
    tensors = load_file(model / "model.safetensors")
    for each in (1, 2):
        if not (model / f"mine{each}.safetensors").exists():
            made = {name: tensor + each for name, tensor in tensors.items()}
            save_file(made, model / f"mine{each}.safetensors", metadata={"format": "pt"})
    alter(model, "config.json", {"transformers_weights": f"mine{number}.safetensors"})


PLANTS = cells(
    "engine",
    "key",
    {
        "other-model": other_model,
        "weight-byte": flip,
        "transformers-weights": named_weights,
    },
)
BESIDE = [
    one
    for one in file_plants("engine", "key")
    if one.values[0].row not in {"other-model", "transformers-weights"}
]
"""Plants that leave the file that is loaded as it is."""


@pytest.mark.parametrize("change", PLANTS)
def test_a_file_that_differs_makes_another_key(model, change):
    made = set()
    for number in (1, 2):
        change(model, number)
        made.add(digest(model))
    assert len(made) == 2


@pytest.mark.parametrize("plant", BESIDE)
def test_every_other_file_that_a_loader_may_read_is_in_the_key(model, plant):
    plant.prepare(model)
    before = digest(model)
    plant.change(model)
    assert digest(model) != before


@pytest.mark.planted("files-alone", "engine", "hit")
def test_files_that_no_loader_takes_weights_from_lose_no_store(model, tmp_path):
    first = answer(model, tmp_path / "kv")
    for name in ("README.md", "notes.json", "other.model"):
        (model / name).write_text("{}")
    again = answer(model, tmp_path / "kv")
    assert again.reused_store_tokens == FULL
    assert again.output_token_ids == first.output_token_ids


@pytest.mark.planted("same-revision", "engine", "key")
def test_a_revision_names_weights_and_no_settings(model):
    named = digest(model, revision="org/name@1")
    alter(model, "config.json", {"rope_theta": 20_000.0})
    assert digest(model, revision="org/name@1") != named


@pytest.mark.planted("weights-not-stored", "engine", "refused")
def test_weights_that_the_files_lack_are_refused(model):
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.0.self_attn.k_proj.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"no weights of .*k_proj.weight: it is incomp"):
        LLM(model)


# ------------------------------------------------------------------------------------- settings


@pytest.mark.planted(
    "overridden-configuration computes-in-other-dtype cache-dtype other-block-size",
    "other-window",
    "engine",
    "key",
)
def test_settings_of_the_engine_that_shape_kv_make_another_key(plain, tmp_path):
    store = tmp_path / "kv"
    assert answer(plain, store).reused_store_tokens == 0
    others: list[dict[str, Any]] = [
        {"computes": "float32"},
        {"dtype": "fp8"},  # of the cache
        {"computes": "float32", "dtype": "fp8"},
        {"tokens_per_block": 32},
        {"max_attention_window": [32]},
    ]
    for other in others:
        assert answer(plain, store, **other).reused_store_tokens == 0, other
    assert answer(plain, store).reused_store_tokens == FULL


@pytest.mark.planted("other-adapter", "no-adapter", "engine", "key")
def test_the_id_of_an_adapter_keeps_blocks_apart(plain):
    one = SamplingParams(max_tokens=1)
    with LLM(plain, kv_cache=KvCacheConfig(max_tokens=512, tokens_per_block=16)) as llm:
        for lora_id in (None, "a", "b"):
            found = [
                llm.generate(PROMPT, one, lora_id=lora_id)[0].reused_device_tokens for _ in "12"
            ]
            assert found == [0, FULL], lora_id


# ------------------------------------------------------------------------------------- families

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 2}
HEADS = {"head_dim": 16}


def family(model_type: str, **settings: Any) -> PreTrainedModel:
    config = AutoConfig.for_model(model_type, **SIZES | settings)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return made.eval()


REFUSED = cells(
    "engine",
    "refused",
    {
        "bidirectional": (
            "gemma3_text",
            HEADS | {"use_bidirectional_attention": True},
            "bidirectional attention",
        ),
        "bidirectional: llama": ("llama", {"is_causal": False}, "bidirectional attention"),
        "encoder-as-decoder": ("bert", {"is_decoder": False}, "bidirectional attention"),
        "encoder-as-decoder: roberta": (
            "roberta",
            {"is_decoder": False},
            "bidirectional attention",
        ),
        "window-not-passed": ("moshi", HEADS | {"sliding_window": 8}, "its configuration 8"),
        "window-not-passed: llama": ("llama", {"sliding_window": 8}, "its configuration 8"),
        "window-not-passed: chunks": ("llama", {"attention_chunk_size": 8}, "chunked attention"),
        "window-not-passed: sinks": (
            "llama",
            {"attention_sink_size": 4},
            "size=4 .* is not passed",
        ),
        "window-not-passed: local": ("llama", {"local_window_size": 4}, "size=4 .* is not passed"),
        "alibi-by-length": (
            "mpt",
            {"d_model": 32, "n_heads": 2, "n_layers": 2},
            "biases are made for the length of the cache",
        ),
    },
)


@pytest.mark.parametrize(("model_type", "settings", "message"), REFUSED)
def test_models_that_a_cache_changes_are_refused(model_type, settings, message, tmp_path):
    family(model_type, **settings).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=message):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "settings", "windows"),
    [
        ("phimoe", EXPERTS | {"sliding_window": 128}, (None, None)),
        ("llama", {"sliding_window": 4096}, (None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8)),
        ("qwen3", HEADS | {"use_sliding_window": False, "sliding_window": 8}, (None, None)),
        (
            "qwen3",
            HEADS | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            (None, 8),
        ),
        ("bert", {"is_decoder": True}, (None, None)),
    ],
)
def test_windows_that_all_agree_on_are_served(model_type, settings, windows):
    made = family(model_type, **settings)
    assert checked_windows(made, longest=128) == windows


def test_a_window_that_only_the_mask_has_counts_for_those_who_use_the_mask():
    """Attention by masks, as `generate()` has it by default; flash attention uses none."""
    made = family("phimoe", **EXPERTS | {"sliding_window": 8})
    assert checked_windows(made, longest=128, by_mask=True) == (8, 8)
    with pytest.raises(UnsupportedModel, match="tells its attention none, its mask 8"):
        checked_windows(made, longest=128)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_attends_as_before_after_it_was_checked(implementation):
    made = family("mistral", sliding_window=8)
    made.set_attn_implementation(implementation)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        before = made(ids).logits
        assert checked_windows(made, longest=None) == (8, 8)
        after = made(ids).logits
    assert torch.equal(before, after)
    assert made.config._attn_implementation == implementation


def test_a_model_without_an_attention_interface_has_no_known_windows():
    assert checked_windows(family("bloom", n_layer=2, n_head=2), longest=None) is None
    with pytest.raises(UnsupportedModel, match="biases are made for the length of the cache"):
        checked_windows(family("mpt", d_model=32, n_heads=2, n_layers=2), longest=None)


@pytest.mark.planted("dynamic-rope", "long-factors", "engine", "refused")
@pytest.mark.parametrize(("kind", "longest"), [("dynamic", 63), ("longrope", 64)])
def test_sequences_end_where_rope_changes(kind, longest, tmp_path):
    rope: dict[str, Any] = {"rope_type": kind, "factor": 2.0, "rope_theta": 10_000.0}
    rope["original_max_position_embeddings"] = 64
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = make_model(tmp_path / "model", "llama", config_overrides={"rope_parameters": rope})
    one = SamplingParams(max_tokens=1)
    with LLM(model, kv_cache=KvCacheConfig(max_tokens=256)) as llm:
        assert len(llm.generate([5] * longest, one)[0].output_token_ids) == 1
        with pytest.raises(ConfigurationError, match=f"exceed {longest} positions"):
            llm.generate([5] * (longest + 1), one)
