"""A store that is slow, full, dead, late or lying may cost time, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness import PARAMS, PROMPT, T, answer, open_llm
from late_store import LateStore
from torch import Tensor

from kvconnect import KvCacheConnectorConfig, SamplingParams
from kvconnect.keys import BlockKey


class RaisesOnLoad(LateStore):
    """Says yes, then fails."""

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        raise RuntimeError("load")


def test_a_tail_that_does_not_load_into_a_full_pool(model: Path) -> None:
    prompt = PROMPT[: 3 * T + 10]
    other = [*prompt[:-2], 3, 4]
    few = SamplingParams(max_tokens=4, ignore_eos=True)
    # Device and store have the other's tail; the pool has no block left to copy the device's.
    with open_llm(model, RaisesOnLoad(), max_tokens=4 * T) as llm:
        llm.generate([prompt], few)
        got = llm.generate([other], few)[0].output_token_ids
    with open_llm(model) as llm:
        assert got == llm.generate([other], few)[0].output_token_ids


class LoadsLate(LateStore):
    """Holds every load of what it has now, and writes into its buffers only then."""

    def hold(self) -> None:
        self.held = set(self.frames)

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        await super().load(keys, into)
        for buffer in into:
            buffer.fill_(0xA5)
        return len(keys)


def test_a_load_that_writes_after_its_deadline_touches_nobody(
    model: Path, expected: list[int]
) -> None:
    backend = LoadsLate()
    answer(model, backend)
    backend.hold()
    config = KvCacheConnectorConfig(backend=backend, load_timeout_s=0.3, save_timeout_s=1)
    others = [PROMPT[i:] for i in range(1, 5)]
    alone = [answer(model, prompt=prompt).output_token_ids for prompt in others]
    with open_llm(model, config) as llm:
        try:
            assert list(llm.generate([PROMPT], PARAMS)[0].output_token_ids) == expected
            handles = [llm.submit(prompt, PARAMS) for prompt in others]
        finally:
            backend.release()
        assert [handle.result(60).output_token_ids for handle in handles] == alone
        assert list(llm.generate([PROMPT], PARAMS)[0].output_token_ids) == expected


def test_who_waits_for_the_blocks_of_an_aborted_load_gets_them(
    model: Path, expected: list[int]
) -> None:
    backend = LoadsLate()
    answer(model, backend)
    backend.hold()
    # Room for one of them: the second waits for what the first one's load still holds.
    with open_llm(model, backend, max_tokens=len(PROMPT) + PARAMS.max_tokens) as llm:
        try:
            loading = llm.submit(PROMPT, PARAMS)
            assert backend.waits.wait(60)
            waiting = llm.submit(PROMPT, PARAMS.model_copy(update={"max_tokens": 23}))
            loading.abort()
            assert loading.result(60).finish_reason == "abort"
        finally:
            backend.release()
        assert list(waiting.result(60).output_token_ids) == expected[:23]
