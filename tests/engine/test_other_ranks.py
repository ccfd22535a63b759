"""What engines of other sizes saved or computed, an engine goes on from: equal tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from free_ports import free_ports
from observed import patient, tokens

from kvconnect import LLM, SamplingParams

ANSWER = SamplingParams(max_tokens=10)
PREFILL = SamplingParams(max_tokens=0)
# Grouped queries, a KV head for each query head, latent attention, a sliding window.
ARCHITECTURES = ["llama", "gpt_neox", "deepseek_v3", "gemma3"]


class Engines:
    """Engines of one model, one of several ranks at a time, on one store, that hand prompts over.

    What they answer is compared with what transformers answers.
    """

    def __init__(
        self, model: Path, store: Path, open_llm: Callable[..., LLM], reference: Callable[..., list]
    ) -> None:
        self._model, self._open_llm, self._reference = model, open_llm, reference
        self._store = f"disk://{store}?capacity=64MiB"
        self._seeds = iter(range(100))

    def open(self, ranks: int, *, stored: bool = True, **more: object) -> LLM:
        transfer = {"role": "both", "listen": f"127.0.0.1:{free_ports(ranks)}"}
        connector = patient(self._store if stored else None, transfer=transfer)
        return self._open_llm(
            self._model,
            connector=connector,
            tensor_parallel_size=ranks,
            device="cpu",
            max_num_tokens=48,
            **more,
        )

    def prompts(self) -> list[list[int]]:
        """New ones, shorter and longer than a block, a chunk and a window."""
        rng = np.random.default_rng(next(self._seeds))
        return [rng.integers(1, 250, length).tolist() for length in (17, 39, 70, 100)]

    def answers(self, llm: LLM, prompts: list[list[int]], params: object = None) -> list[int]:
        """Check what `llm` answers, and return how many tokens of each prompt came from others."""
        carried = params or [None] * len(prompts)
        handles = [
            llm.submit(prompt, ANSWER, kv_transfer_params=one)
            for prompt, one in zip(prompts, carried, strict=True)
        ]
        outputs = [handle.result(60) for handle in handles]
        assert tokens(outputs) == self._reference(self._model, prompts, ANSWER.max_tokens)
        return [one.reused_store_tokens for one in outputs]

    def restart(self, old: LLM, new: Callable[[], LLM]) -> LLM:
        """What `old` has saved when it is closed, `new` loads: all but the last token."""
        prompts = self.prompts()
        assert self.answers(old, prompts) == [0] * len(prompts)
        old.close()
        opened = new()
        assert self.answers(opened, prompts) == [len(one) - 1 for one in prompts]
        return opened

    def hand_over(self, prefill: LLM, decode: LLM, *, computed: Sequence[int] = ()) -> None:
        """What `prefill` computes, `decode` fetches, but prompts of `computed` tokens."""
        prompts = self.prompts()
        params = [
            one.kv_transfer_params
            for one in prefill.generate(prompts, PREFILL, kv_transfer_params={"do": "prefill"})
        ]
        reused = self.answers(decode, prompts, params)
        lengths = [len(one) for one in prompts]
        assert reused == [0 if length in computed else length - 1 for length in lengths]


@pytest.fixture
def engines(open_llm, reference, model_of, tmp_path) -> Callable[[str], Engines]:
    """Makes the engines of an architecture."""
    return lambda arch: Engines(model_of(arch), tmp_path / arch, open_llm, reference)


def goes_on(engines: Engines, saved_by: int, ranks: int, arch: str) -> None:
    """`ranks` from `saved_by` over a store, from one directly; and one from `ranks` both ways."""
    several = engines.restart(engines.open(saved_by), lambda: engines.open(ranks))
    one = engines.open(1, stored=False, tokens_per_block=64)
    engines.hand_over(one, several)
    # What a window has given up before block 2 of 16 tokens, a block of 64 would have to hold.
    engines.hand_over(several, one, computed=(70,) if arch == "gemma3" else ())
    engines.restart(several, lambda: engines.open(1))


@pytest.mark.planted("other-rank-count", "engine", "equal")
def test_one_rank_and_two_go_on_from_each_other(engines):
    goes_on(engines("llama"), 1, 2, "llama")


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "ranks"), [(1, 2), (2, 4)])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_whatever_the_heads_and_the_number_of_ranks(arch, saved_by, ranks, engines):
    goes_on(engines(arch), saved_by, ranks, arch)
