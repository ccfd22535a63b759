"""One prefix, two engines: saved by plain transformers, loaded by kvconnect's own, and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvconnect import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from kvconnect.engine.request.output import RequestOutput
from kvconnect.integrations.transformers import PromptCache

T = 16
PROMPT = torch.randint(1, 250, (1, 203), generator=torch.Generator().manual_seed(7))
NUM_TOKENS = 24

# Kernels sum in another order: in float32 the logits of small models differ by a few 1e-6 of their
# size, keys and values that come from the other engine add as much again.
TOLERANCE = 1e-4

ARCHS = ["llama", pytest.param("qwen3", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def loaded(model_of: Callable[[str], Path]) -> Callable[[str], PreTrainedModel]:
    """A small model in float32, not to be changed."""

    @cache
    def load(arch: str) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(model_of(arch), dtype=torch.float32)

    return load


def config(directory: Path, namespace: str | None = "shared") -> KvCacheConnectorConfig:
    return KvCacheConnectorConfig(
        url=f"disk://{directory}/kv?capacity=64MiB",
        namespace=namespace,
        lookup_timeout_ms=60_000,
        overlap_loads=False,
    )


def by_transformers(
    model: PreTrainedModel, connector: KvCacheConnectorConfig | None
) -> tuple[list[int], list[torch.Tensor], int]:
    """Tokens, the logits that each was chosen by, and how much of the prompt was loaded."""
    inputs = {"input_ids": PROMPT, "attention_mask": torch.ones_like(PROMPT)}
    settings = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    if connector is None:
        output = model.generate(
            **inputs, **settings, return_dict_in_generate=True, output_logits=True
        )
        return output.sequences[0, PROMPT.shape[1] :].tolist(), list(output.logits), 0
    with PromptCache(model, connector, tokens_per_block=T) as prompts:
        past = prompts.prefill(inputs)
        output = model.generate(
            **inputs,
            **settings,
            past_key_values=past,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[0, PROMPT.shape[1] :].tolist()
        return tokens, list(output.logits), past.loaded_tokens[0]


def by_engine(model: Path, connector: KvCacheConnectorConfig | None) -> RequestOutput:
    with LLM(
        model,
        kv_cache=KvCacheConfig(tokens_per_block=T, max_tokens=1024),
        connector=connector,
        dtype="float32",
    ) as llm:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
        return llm.generate([PROMPT[0].tolist()], params)[0]


def equal_up_to_a_near_tie(
    tokens: list[int], expected: list[int], logits: list[torch.Tensor]
) -> bool:
    """Whether the first difference, if any, is where the two best tokens are as good as one."""
    for one, other, scores in zip(tokens, expected, logits, strict=True):
        if one != other:
            best = scores[0].topk(2).values
            return bool(best[0] - best[1] <= TOLERANCE * scores.abs().max())
    return True


@pytest.mark.parametrize("arch", ARCHS)
def test_the_engine_loads_what_transformers_saved(arch, loaded, model_of, tmp_path):
    expected, logits, _ = by_transformers(loaded(arch), None)
    by_transformers(loaded(arch), config(tmp_path))
    output = by_engine(model_of(arch), config(tmp_path))
    assert output.reused_store_tokens == PROMPT.shape[1] - 1
    assert equal_up_to_a_near_tie(list(output.output_token_ids), expected, logits)
    first = logits[0][0].log_softmax(-1)
    for token, one in output.logprobs[0].items():
        assert abs(one.logprob - float(first[token])) <= TOLERANCE * float(logits[0].abs().max())


@pytest.mark.parametrize("arch", ARCHS)
def test_transformers_loads_what_the_engine_saved(arch, loaded, model_of, tmp_path):
    expected, logits, _ = by_transformers(loaded(arch), None)
    by_engine(model_of(arch), config(tmp_path))
    tokens, restored, count = by_transformers(loaded(arch), config(tmp_path))
    assert count == PROMPT.shape[1] - 1
    assert equal_up_to_a_near_tie(tokens, expected, logits)
    assert (restored[0] - logits[0]).abs().max() <= TOLERANCE * logits[0].abs().max()


def test_without_a_common_namespace_neither_sees_the_others_blocks(loaded, model_of, tmp_path):
    by_transformers(loaded("llama"), config(tmp_path, None))
    by_transformers(loaded("llama"), config(tmp_path))
    assert by_engine(model_of("llama"), config(tmp_path, None)).reused_store_tokens == 0
