"""Tries with engines of our own: the files, or the number of ranks, change between two of them."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch
from engines import PREFILL, open_engine
from frame_store import FrameStore
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams

T = 4
NEW = 4


@dataclass
class Tally:
    """What tries have come to."""

    tries: int = 0
    hits: int = 0
    wrong: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def plain(model: PreTrainedModel, ids: Tensor) -> list[int]:
    mask = torch.ones_like(ids)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=mask, **settings)[0].tolist()


def weight_in_file(model: Path, other: Path, rng: random.Random) -> None:
    tensors = load_file(model / "model.safetensors")
    name = rng.choice([one for one in tensors if "proj" in one])
    save_file(tensors | {name: tensors[name] * 1.5}, model / "model.safetensors", {"format": "pt"})


def other_files(model: Path, other: Path, rng: random.Random) -> None:
    shutil.copy(other / "model.safetensors", model / "model.safetensors")


def setting_in_file(model: Path, other: Path, rng: random.Random) -> None:
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = config["rope_parameters"] | {"rope_theta": 77.0}
    (model / "config.json").write_text(json.dumps(config))


def named_file(model: Path, other: Path, rng: random.Random) -> None:
    shutil.copy(other / "model.safetensors", model / "mine.safetensors")
    config = json.loads((model / "config.json").read_text())
    config["transformers_weights"] = "mine.safetensors"
    (model / "config.json").write_text(json.dumps(config))


def shards(model: Path, other: Path, rng: random.Random) -> None:
    """An index and a shard of the other model take the place of the one file."""
    (model / "model.safetensors").unlink()
    shutil.copy(other / "model.safetensors", model / "model-00001-of-00001.safetensors")
    names = load_file(other / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def same_files(model: Path, other: Path, rng: random.Random) -> None:
    (model / "README.md").write_text("The same model.")


FILES = (weight_in_file, other_files, setting_in_file, named_file, shards, same_files, same_files)


def engine_try(
    directories: list[Path], tmp_path: Path, number: int, rng: random.Random, tally: Tally
) -> None:
    """Two engines on one store, perhaps with other blocks; the directory changes between them."""
    model = shutil.copytree(directories[0], tmp_path / str(number))
    ids = rng.choices(range(1, 250), k=rng.randrange(9, 30))
    store, hit = FrameStore(), False
    change = rng.choice(FILES)
    tally.kinds[change.__name__] += 1
    for phase in range(2):
        config = KvCacheConfig(max_tokens=128, tokens_per_block=rng.choice((T, T, T, 2 * T)))
        connector = KvCacheConnectorConfig(backend=store, lookup_timeout_ms=60_000)
        with LLM(model, kv_cache=config, connector=connector, device="cpu") as llm:
            params = SamplingParams(max_tokens=NEW, ignore_eos=True)
            output = llm.generate(ids, params)[0]
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        hit |= output.reused_store_tokens > 0
        if [*ids, *output.output_token_ids] != plain(loaded, torch.tensor([ids])):
            tally.wrong.append(f"{change.__name__}, {output.reused_store_tokens} loaded")
        if phase == 0:
            change(model, directories[1], rng)
    shutil.rmtree(model)
    tally.hits += hit


def transfer_try(
    directories: list[Path], tmp_path: Path, number: int, rng: random.Random, tally: Tally
) -> None:
    """One engine computes a prompt, another goes on, with the same files or changed ones."""
    theirs = shutil.copytree(directories[0], tmp_path / f"{number} prefill")
    ours = shutil.copytree(directories[0], tmp_path / f"{number} decode")
    ids = rng.choices(range(1, 250), k=rng.randrange(9, 30))
    change = rng.choice(FILES)
    tally.kinds[f"{change.__name__} at peer"] += 1
    change(rng.choice([theirs, ours]), directories[1], rng)
    small = {"tokens_per_block": T, "max_tokens": 128, "device": "cpu"}
    with (
        open_engine(theirs, "prefill", **small) as prefill,
        open_engine(ours, "decode", **small) as decode,
    ):
        (first,) = prefill.generate([ids], PREFILL, kv_transfer_params={"do": "prefill"})
        params = SamplingParams(max_tokens=NEW, ignore_eos=True)
        (output,) = decode.generate([ids], params, kv_transfer_params=first.kv_transfer_params)
    loaded = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float64)
    if [*ids, *output.output_token_ids] != plain(loaded, torch.tensor([ids])):
        tally.wrong.append(f"{change.__name__} at peer, {output.reused_store_tokens} fetched")
    tally.hits += output.reused_store_tokens > 0
    shutil.rmtree(theirs)
    shutil.rmtree(ours)


def rank_try(
    directories: list[Path], tmp_path: Path, number: int, rng: random.Random, tally: Tally
) -> None:
    """Three engines of one or two ranks on one store; the files may change, too."""
    model = shutil.copytree(directories[0], tmp_path / str(number))
    ids = rng.choices(range(1, 250), k=rng.randrange(9, 30))
    ranks = rng.choice([(1, 2, 1), (2, 1, 2), (2, 2, 1), (1, 2, 2)])
    change, phase = rng.choice(FILES), rng.choice((1, 2))
    what = f"{change.__name__} before {phase} of {ranks} ranks"
    tally.kinds[what] += 1
    url, hit = f"disk://{tmp_path}/{number}-kv?capacity=16MiB", False
    for place, size in enumerate(ranks):
        if place == phase:
            change(model, directories[1], rng)
        with LLM(
            model,
            kv_cache=KvCacheConfig(max_tokens=128, tokens_per_block=T),
            connector=KvCacheConnectorConfig(url=url, lookup_timeout_ms=60_000),
            device="cpu",
            tensor_parallel_size=size,
        ) as llm:
            output = llm.generate(ids, SamplingParams(max_tokens=NEW, ignore_eos=True))[0]
        loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
        hit |= output.reused_store_tokens > 0
        if [*ids, *output.output_token_ids] != plain(loaded, torch.tensor([ids])):
            tally.wrong.append(f"{what}, {output.reused_store_tokens} loaded")
    shutil.rmtree(model)
    shutil.rmtree(tmp_path / f"{number}-kv")
    tally.hits += hit
