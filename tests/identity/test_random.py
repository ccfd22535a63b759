"""Identities at random: one model changes, in any way and at any moment, while a store lives on.

Whatever is loaded gives the tokens of the model that loads it. A try is seeded with its number, and
says it when it fails.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tries import NEW, T, Tally, engine_try, plain, rank_try, transfer_try
from frame_store import FrameStore
from model_changes import (
    Change,
    add_hook,
    attention,
    cast_to_and_fro,
    change_buffer,
    change_setting,
    fused_step,
    load_other,
    merge,
    patch_forward,
    plain_step,
    replace_memory,
    weight,
    write,
    write_uncounted,
)
from model_passes import inner_model, with_4d_mask, with_embeddings, with_hole, with_positions
from model_passes import plain as plain_pass
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvconnect.engine.checkpoint.random_model import make_model
from kvconnect.errors import UnsupportedModel, UsageError
from kvconnect.integrations.transformers import PromptCache

SIZE = {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 24}

# ---------------------------------------------------------------------- changes of a loaded model


def write_one_element(model: PreTrainedModel, rng: random.Random) -> None:
    changed = weight(model, rng).data.view(-1)
    changed[rng.randrange(len(changed))] += 3.0


def replace_weight(model: PreTrainedModel, rng: random.Random) -> None:
    module = attention(model, rng).k_proj
    module.weight = nn.Parameter(module.weight.detach() * 1.5)


def cast(model: PreTrainedModel, rng: random.Random) -> None:
    model.to(torch.float32)  # and stays


def replace_module(model: PreTrainedModel, rng: random.Random) -> None:
    layer = rng.choice(model.model.layers)
    layer.self_attn = copy.deepcopy(layer.self_attn)
    write(model, rng)


def nothing(model: PreTrainedModel, rng: random.Random) -> None:
    """Uses it otherwise, which changes nothing."""
    model.generate(torch.arange(1, 6)[None], max_new_tokens=2, do_sample=False, pad_token_id=0)


CHANGES: tuple[Change, ...] = (
    *(write, write_uncounted, write_one_element, replace_weight, replace_memory, load_other),
    *(merge, fused_step, plain_step, change_buffer, change_setting, cast, cast_to_and_fro),
    *(add_hook, patch_forward, replace_module, nothing, nothing),
)

# ---------------------------------------------------------------------- passes of their own


def crop(model: PreTrainedModel, ids: Tensor, past: Any) -> None:
    plain_pass(model, ids, past)
    past.crop(-(ids.shape[1] // 2))
    plain_pass(model, torch.flip(ids, [1]), past)


def later_mask(model: PreTrainedModel, ids: Tensor, past: Any) -> None:
    if past.get_seq_length() < ids.shape[1] - 2:
        plain_pass(model, ids[:, :-2], past)
    with_hole(model, ids, past)


PASSES = (with_4d_mask, with_positions, with_embeddings, inner_model, crop, later_mask)

# ---------------------------------------------------------------------- tries


def two_models(root: Path, **size: int) -> list[Path]:
    return [
        make_model(root / str(seed), "llama", seed=seed, dtype="float64", **(SIZE | size))
        for seed in range(2)
    ]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return two_models(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def divisible(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models that two ranks can share."""
    return two_models(tmp_path_factory.mktemp("divisible"), num_kv_heads=2)


@pytest.fixture(scope="module")
def models(directories: list[Path]) -> list[PreTrainedModel]:
    """Two models of one shape, not to be changed."""
    return [
        AutoModelForCausalLM.from_pretrained(one, dtype=torch.float64).eval() for one in directories
    ]


class PromptCacheTry:
    """A try with `PromptCache`: makes, changes and makes anew, on one store."""

    def __init__(self, models: list[PreTrainedModel], rng: random.Random, tally: Tally) -> None:
        self._rng = rng
        self._tally = tally
        self._store = FrameStore()
        self._pristine = models[0]
        self._model = copy.deepcopy(models[0])
        self._ids = torch.tensor([rng.choices(range(1, 250), k=rng.randrange(9, 30))])
        self._hit = False

    def run(self) -> None:
        rng = self._rng
        change, phase = rng.choice(CHANGES), rng.choice(("before", "prefilled", "between", "after"))
        passes = rng.choice(PASSES) if rng.random() < 0.25 else None
        self._what = f"{change.__name__} {phase} {passes and passes.__name__}"
        self._tally.kinds[f"{change.__name__} {phase}"] += 1
        if phase in {"between", "after"} or rng.random() < 0.5:
            self._use(self._pristine)
        if phase == "before":
            change(self._model, rng)
        with suppress(UnsupportedModel), self._open(self._model) as cache:
            if passes is not None:
                past = cache.prefill(self._ids)
                with suppress(UsageError):  # refused, if something was loaded for another pass
                    passes(self._model, self._ids, past)
            else:
                self._ask(self._model, cache)
            if phase == "between":
                change(self._model, rng)
                self._ask(self._model, cache)
                self._ask(self._model, cache)
            elif phase == "prefilled":
                past = cache.prefill(self._ids)
                change(self._model, rng)
                with suppress(UsageError):  # refused: what was loaded is of the other model
                    self._generate(self._model, past)
        if phase == "after":
            change(self._model, rng)
        for model in rng.sample([self._pristine, self._model], 2):
            self._use(model)
        self._tally.hits += self._hit

    def _open(self, model: PreTrainedModel) -> PromptCache:
        config = {"backend": self._store, "staging_bytes": 1 << 20, "lookup_timeout_ms": 60_000}
        return PromptCache(model, config, tokens_per_block=T, load_decisions=False)

    def _use(self, model: PreTrainedModel) -> None:
        with suppress(UnsupportedModel), self._open(model) as cache:
            self._ask(model, cache)

    def _generate(self, model: PreTrainedModel, past: Any) -> list[int]:
        settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
        mask = torch.ones_like(self._ids)
        made = model.generate(
            self._ids, attention_mask=mask, past_key_values=past, pad_token_id=0, **settings
        )
        return made[0].tolist()

    def _ask(self, model: PreTrainedModel, cache: PromptCache) -> None:
        past = cache.prefill(self._ids)
        loaded = sum(past.loaded_tokens)
        self._hit |= loaded > 0
        if self._generate(model, past) != plain(model, self._ids):
            self._tally.wrong.append(f"{self._what}, {loaded} loaded")


def run(
    numbers: range,
    models: list[PreTrainedModel],
    directories: list[Path],
    divisible: list[Path],
    tmp_path: Path,
) -> Tally:
    tally = Tally()
    for number in numbers:
        rng = random.Random(number)
        known = len(tally.wrong)
        torch.manual_seed(number)
        if number % 100 == 49:
            rank_try(divisible, tmp_path, number, rng, tally)
        elif number % 40 == 19:
            transfer_try(directories, tmp_path, number, rng, tally)
        elif number % 10 == 9:
            engine_try(directories, tmp_path, number, rng, tally)
        else:
            PromptCacheTry(models, rng, tally).run()
        tally.tries += 1
        tally.wrong[known:] = [f"try {number}: {one}" for one in tally.wrong[known:]]
    return tally


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level("CRITICAL"):
        yield


def check(tally: Tally) -> None:
    assert tally.wrong == []
    assert tally.hits >= 0.3 * tally.tries, tally


def test_twenty_identities_at_random(models, directories, divisible, tmp_path):
    check(run(range(20), models, directories, divisible, tmp_path))


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("begin", range(20, 2020, 400))
def test_two_thousand_identities_at_random(models, directories, divisible, tmp_path, begin):
    check(run(range(begin, begin + 400), models, directories, divisible, tmp_path))
