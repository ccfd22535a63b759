"""The process of a prefill or a decode engine, which reports when its work was done.

Times are of ``time.monotonic``, a clock that the processes of one Linux host share.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvconnect import LLM, KvCacheConfig, SamplingParams
from kvconnect.config import KvCacheConnectorConfig, TransferConfig
from kvconnect.engine.request.output import StreamChunk
from kvconnect.trace import Event, metrics
from kvconnect_bench.blocks.worker import methods, serve, take_stdout

_ANSWER = SamplingParams(max_tokens=8, ignore_eos=True)
_PREFILL = SamplingParams(max_tokens=0)
_PATIENCE_S = 60.0


class EngineParty:
    """An engine. Each method is a workload, called by its name."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self._chunks: Iterator[StreamChunk] = iter(())
        self._happened: dict[str, float] = {}
        self._changed = threading.Condition()
        metrics.add_hook(self._hear)

    def start(self, model: str, role: Any, transport: Any, prompt_tokens: int) -> dict[str, int]:
        """Starts the engine; returns the sizes of its blocks."""
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
        transfer = TransferConfig(role=role, transport=transport)
        self._llm = llm = LLM(
            Path(model),
            kv_cache=KvCacheConfig(max_tokens=4 * (prompt_tokens + 64)),
            connector=KvCacheConnectorConfig(transfer=transfer),
            max_num_tokens=prompt_tokens,
        )
        gc.freeze()  # else a collection scans all of torch, for a quarter of a second
        layout = llm.layout
        return {
            "tokens_per_block": layout.tokens_per_block,
            "num_layers": layout.num_layers,
            "layer_nbytes": layout.layer_nbytes,
        }

    def prefill(self, prompt: list[int], transfer_id: str | None = None) -> dict[str, Any]:
        """Computes `prompt` for a decode engine.

        Returns:
            ``computed``: when the last chunk was computed; ``carried``: what decode needs.
        """
        carried = {"do": "prefill"} | ({} if transfer_id is None else {"transfer_id": transfer_id})
        self._forget()
        (output,) = self._engine.generate([prompt], _PREFILL, kv_transfer_params=carried)
        return {"computed": self._when("transfer.computed"), "carried": output.kv_transfer_params}

    def submit(self, prompt: list[int], carried: Mapping[str, Any]) -> None:
        """Begins to answer `prompt` with the blocks that `carried` names."""
        self._forget()
        handle = self._engine.submit(prompt, _ANSWER, kv_transfer_params=dict(carried))
        self._chunks = handle.stream()

    def answer(self) -> dict[str, float]:
        """Waits for the answer to the submitted prompt.

        Returns:
            ``valid``: when all of the prompt was valid here; ``first``: when the first token came;
            ``step``: mean seconds of each further token.
        """
        arrivals = [time.monotonic() for _ in self._chunks]
        steps = (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1)
        return {"valid": self._when("transfer.fetched"), "first": arrivals[0], "step": steps}

    def cpu_seconds(self) -> float:
        """Returns the processor seconds of this process since it began."""
        return time.process_time()

    @property
    def _engine(self) -> LLM:
        if self._llm is None:
            raise RuntimeError("the engine was not started")
        return self._llm

    def _hear(self, event: Event) -> None:
        if event.name in {"transfer.computed", "transfer.fetched"}:
            with self._changed:
                self._happened[event.name] = time.monotonic()
                self._changed.notify_all()

    def _forget(self) -> None:
        with self._changed:
            self._happened.clear()

    def _when(self, name: str) -> float:
        with self._changed:
            if not self._changed.wait_for(lambda: name in self._happened, _PATIENCE_S):
                raise RuntimeError(f"{name} did not happen: the prompt was not handed over")
            return self._happened[name]


def main() -> None:
    """Answers until standard input ends."""
    answers = take_stdout()
    serve(answers, {"torch": torch.__version__}, methods(EngineParty()))


if __name__ == "__main__":
    main()
