"""A real vLLM engine in this process, whose worker is `StandInWorker`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stand_in_worker import STATE, StandInWorker, Window, answer_of
from vllm import envs
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.platforms.cpu import CpuPlatform
from vllm_engine import Engine

from kvconnect.integrations.vllm import connector as adapter

SIZE = 16
"""Tokens of a block."""


@contextmanager
def vllm_on_any_machine(mode: str) -> Iterator[None]:
    """Where vLLM takes the machine for a CPU: what it and the adapter do on a GPU."""
    check = CpuPlatform.check_and_update_config
    runner, _, overlapping = mode.partition("-")

    def keep_overlapping(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = bool(overlapping)
        if STATE in config.additional_config.get("windows", ()):
            config.cache_config.mamba_cache_mode = "align"  # as for models that vLLM knows

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1" if runner == "v2" else "0")
        envs.disable_envs_cache()
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keep_overlapping))
        patch.setattr("vllm.config.vllm.HAS_TRITON", True)  # 0.32 has no V2 without
        # The tensors are those of a GPU: keys and values of a token side by side.
        patch.setattr(adapter, "cpu_packing", lambda _: None)
        yield
    envs.disable_envs_cache()


class StandInEngine(Engine):
    """`Engine`, and what a test asks of its worker."""

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any] | None,
        *,
        windows: Sequence[Window] = (None,) * 3,
        layout: str = "LBHNC",
        **options: Any,
    ) -> None:
        assert not has_kv_transfer_group(), "vLLM keeps one in a process"
        self.windows = windows
        super().__init__(
            model,
            transfer,
            worker_cls=f"{StandInWorker.__module__}.{StandInWorker.__name__}",
            additional_config={"windows": list(windows), "layouts": [layout]},
            **({"block_size": SIZE, "max_model_len": 1024} | options),
        )

    def wanted(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8) -> list[list[int]]:
        """What must be answered."""
        elements = self.stand_in.elements
        return [answer_of(one, num_tokens, self.windows, elements) for one in prompts]

    @property
    def stand_in(self) -> StandInWorker:
        return self.core.model_executor.driver_worker.worker

    def forget_device(self) -> None:
        """Nothing of the device's own prefix cache is left, nor of its memory."""
        super().forget_device()
        self.poison(slice(None))

    def poison(self, blocks: Any) -> None:
        """What is neither loaded nor computed is no number."""
        for cache in self.stand_in.caches.values():
            if cache.is_floating_point():  # groups of states have the same memory
                cache[blocks] = float("nan")

    def poison_what_fails(self) -> None:
        """From now on, also the blocks of loads that are reported as failed."""
        half = self.worker._worker
        take = type(half).take_invalid_blocks

        def take_and_poison() -> set[int]:
            invalid = take(half)
            if invalid:
                self.poison(sorted(invalid))
            return invalid

        half.take_invalid_blocks = take_and_poison

    # ------------------------------------------------------------------ requests one by one

    def run(
        self,
        names: Sequence[str],
        within_s: float = 60,
        found: dict[str, list[int]] | None = None,
    ) -> list[list[int]]:
        """The answers of `names`, some of which may be `found`; none of those that were aborted."""
        found = {} if found is None else found
        until = time.monotonic() + within_s
        while self.llm.llm_engine.has_unfinished_requests():
            assert time.monotonic() < until
            self.step(found)
        return [found.get(name, []) for name in names]
