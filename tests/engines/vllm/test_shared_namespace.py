"""One prefix, vLLM and kvconnect's own engine: each loads what the other saved.

That transformers and kvconnect's own do is in tests/integrations/test_shared_namespace.py.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import safetensors.torch
import torch
import vllm
from transformers import AutoModelForCausalLM
from vllm_engine import BLOCK, connector, engine, prompts_of

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams

pytestmark = pytest.mark.engines

# One ends in a block that what is generated does not fill, one in a full block.
PROMPTS = prompts_of(6 * BLOCK + 3, 3 * BLOCK)
NOTHING = [0, 0]
NUM_TOKENS = 24
NUM_BEST = 20  # tokens whose log probabilities are compared, at each place

# Kernels sum in another order: in float32 the logits of small models differ by a few 1e-6 of their
# size, keys and values that come from the other engine add as much again.
TOLERANCE = 1e-4

REVISION = "a name@of some weights"


@dataclass(frozen=True)
class Answer:
    """To one prompt.

    Attributes:
        tokens: that were generated.
        best: by place, log probabilities of the best tokens.
        num_loaded: tokens of the prompt that came from the store.
    """

    tokens: list[int]
    best: list[dict[int, float]]
    num_loaded: int


By = Callable[..., list[Answer]]


def by_vllm(
    model: Path, url: str, namespace: str = "shared", revision: str | None = None
) -> list[Answer]:
    transfer = connector(url, namespace=namespace, model_revision=revision)
    with engine(model, transfer) as made:
        sampling = vllm.SamplingParams(
            max_tokens=NUM_TOKENS,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            logprobs=NUM_BEST,
        )
        inputs: list[Any] = [{"prompt_token_ids": one} for one in PROMPTS]
        outputs = made.llm.generate(inputs, sampling, use_tqdm=False)
        return [
            Answer(
                list(one.outputs[0].token_ids),
                [
                    {token: found.logprob for token, found in best.items()}
                    for best in one.outputs[0].logprobs
                ],
                one.num_cached_tokens or 0,
            )
            for one in outputs
        ]


def by_own_engine(
    model: Path, url: str, namespace: str | None = "shared", revision: str | None = None
) -> list[Answer]:
    with LLM(
        str(model),
        dtype="float32",
        kv_cache=KvCacheConfig(tokens_per_block=BLOCK, max_tokens=4096),
        connector=KvCacheConnectorConfig(
            url=url, namespace=namespace, lookup_timeout_ms=60_000, overlap_loads=False
        ),
        model_revision=revision,
    ) as llm:
        params = SamplingParams(
            max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=NUM_BEST
        )
        return [
            Answer(
                list(one.output_token_ids),
                [{token: found.logprob for token, found in best.items()} for best in one.logprobs],
                one.reused_store_tokens,
            )
            for one in llm.generate(PROMPTS, params)
        ]


def generated(model: Any, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """What plain transformers answers: tokens, and the logits that each was chosen by."""
    ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return output.sequences[0, len(prompt) :].tolist(), torch.cat(output.logits)


ENGINES: dict[str, By] = {"vllm": by_vllm, "own": by_own_engine}
PAIRS = list(permutations(ENGINES))


@cache
def logits_of(model: Path) -> list[tuple[list[int], torch.Tensor]]:
    """What plain transformers answers, without any store."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return [generated(loaded, prompt) for prompt in PROMPTS]


def difference(model: Path, answers: Sequence[Answer]) -> float:
    """Of log probabilities from plain transformers', as a part of the logits' size.

    Up to the first other token, if the two are as good as one there; otherwise it is infinite.
    """
    largest = 0.0
    for (tokens, logits), answer in zip(logits_of(model), answers, strict=True):
        for place, scores in enumerate(logits):
            size = float(scores.abs().max())
            expected = scores.log_softmax(-1)
            for token, logprob in answer.best[place].items():
                largest = max(largest, abs(logprob - float(expected[token])) / size)
            if answer.tokens[place] != tokens[place]:
                lost = scores[tokens[place]] - scores[answer.tokens[place]]
                if lost > TOLERANCE * size:
                    return float("inf")
                break
    return largest


def to_load(saver: str, loader: str) -> list[int]:
    """Of each prompt: vLLM saves and loads whole blocks, the others all but the last token."""
    found = []
    for prompt in PROMPTS:
        whole = len(prompt) // BLOCK * BLOCK
        saved = whole if saver == "vllm" else len(prompt)
        found.append(min(saved, whole if loader == "vllm" else len(prompt) - 1))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """A store that an engine has filled; each time a copy."""
    root = tmp_path_factory.mktemp("stores")

    @cache
    def directory(saver: str, model: Path, revision: str | None) -> Path:
        filled = root / f"{saver}-{model.name}"
        answers = ENGINES[saver](model, at(filled), revision=revision)
        assert [one.num_loaded for one in answers] == NOTHING
        return filled

    def store(saver: str, model: Path, revision: str | None = None) -> str:
        filled = directory(saver, model, revision)
        return at(shutil.copytree(filled, tempfile.mkdtemp(dir=root), dirs_exist_ok=True))

    return store


def at(directory: Path) -> str:
    return f"disk://{directory}?capacity=64MiB"


@pytest.fixture(scope="module")
def almost_llama(llama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`llama` with values a hundredth larger in one layer."""
    model = tmp_path_factory.mktemp("models") / "almost"
    shutil.copytree(llama, model)
    weights = safetensors.torch.load_file(model / "model.safetensors")
    weights["model.layers.1.self_attn.v_proj.weight"] *= 1.01
    safetensors.torch.save_file(weights, model / "model.safetensors", {"format": "pt"})
    return model


@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_what_one_engine_saved_another_loads(llama, saved, saver, loader):
    answers = ENGINES[loader](llama, saved(saver, llama))
    assert [one.num_loaded for one in answers] == to_load(saver, loader)
    assert difference(llama, answers) <= TOLERANCE


@pytest.mark.parametrize(("saver", "loader"), PAIRS)
def test_keys_and_values_that_are_a_little_wrong_would_be_seen(
    llama, almost_llama, saved, saver, loader
):
    """Two models by one name."""
    answers = ENGINES[loader](llama, saved(saver, almost_llama, REVISION), revision=REVISION)
    assert [one.num_loaded for one in answers] == to_load(saver, loader)
    assert difference(llama, answers) > 10 * TOLERANCE


def test_without_a_common_namespace_neither_sees_the_others_blocks(llama, saved):
    assert [one.num_loaded for one in by_vllm(llama, saved("own", llama), "engine")] == NOTHING
    assert [one.num_loaded for one in by_own_engine(llama, saved("vllm", llama), None)] == NOTHING
