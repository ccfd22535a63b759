"""A real vLLM engine in this process, with `KvConnect`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import vllm
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.triton_utils import dispatcher

_rebind = dispatcher._rebind_kernels


def _rebind_once(overrides: Any) -> None:
    """What vLLM does when it looks for devices; a second time, it fails over numba's objects."""
    dispatcher._rebind_kernels = lambda _: None
    _rebind(overrides)


dispatcher._rebind_kernels = _rebind_once

BLOCK = 32
SIZE = {
    "hidden_size": 256,
    "num_heads": 8,
    "num_kv_heads": 4,
    "intermediate_size": 256,
    "num_layers": 3,
    "max_position_embeddings": 8192,
}
"""A model whose heads vLLM's kernels on the CPU know: of 32 elements."""


def connector(url: str, **extra: Any) -> dict[str, Any]:
    """The configuration of `KvConnect`; names in capitals of vLLM's own fields in small ones."""
    own = {name.lower(): extra.pop(name) for name in list(extra) if name.isupper()}
    return {
        "kv_connector": "KvConnect",
        "kv_connector_module_path": "kvconnect.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url, "lookup_timeout_ms": 5000.0, **extra},
        **own,
    }


@dataclass
class Answer:
    tokens: list[int]
    cached: int
    reason: str | None


class Engine:
    """An engine, and what a test asks of it."""

    def __init__(self, model: Path, transfer: dict[str, Any] | None, **options: Any) -> None:
        settings: dict[str, Any] = {
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 2048,
            "block_size": BLOCK,
            "disable_log_stats": False,
        }
        self.llm = vllm.LLM(str(model), kv_transfer_config=transfer, **(settings | options))
        self._numbers = 0

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def worker(self) -> Any:
        """The connector of the worker, in the same process."""
        return get_kv_transfer_group()

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int = 8,
        *,
        salt: str | None = None,
        lora: Any = None,
        params: dict[str, Any] | None = None,
    ) -> list[Answer]:
        """Greedy answers to `prompts`, all at once."""
        sampling = vllm.SamplingParams(
            max_tokens=num_tokens,
            temperature=0,
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        inputs: list[Any] = [{"prompt_token_ids": list(one)} for one in prompts]
        for one in inputs:
            if salt is not None:
                one["cache_salt"] = salt
        self.outputs = self.llm.generate(inputs, sampling, use_tqdm=False, lora_request=lora)
        return [
            Answer(
                list(one.outputs[0].token_ids),
                one.num_cached_tokens or 0,
                one.outputs[0].finish_reason,
            )
            for one in self.outputs
        ]

    def tokens(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, **more: Any):
        return [one.tokens for one in self.answer(prompts, num_tokens, **more)]

    def forget_device(self) -> None:
        """Nothing of the device's own prefix cache is left: what is cached comes from a store."""
        assert self.llm.reset_prefix_cache()

    def flush(self) -> None:
        """Until all that was saved is in the store."""
        half = self.worker._worker
        assert half._worker._queue.flush(30)

    def settle(self) -> None:
        """Let requests that ended, but whose blocks are kept, go."""
        until = time.monotonic() + 30
        while self.scheduler.has_requests() and time.monotonic() < until:
            self.core.step_fn()

    def check_empty(self) -> None:
        """No request, and no block, is left of anything."""
        self.settle()
        scheduler = self.scheduler
        assert not scheduler.requests
        assert scheduler.kv_cache_manager.block_pool.get_usage() == 0.0
        half = getattr(self.connector, "_scheduler", None)
        if half is not None:
            assert half.num_tracked == 0
            assert not half._names
            assert not half._scheduler._states
            worker = self.worker._worker
            assert not worker._names
            assert not worker._loads

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


@contextmanager
def engine(model: Path, transfer: dict[str, Any] | None, **options: Any) -> Iterator[Engine]:
    """An engine that is empty when it ends, and then shut down."""
    made = Engine(model, transfer, **options)
    try:
        yield made
        made.check_empty()
    finally:
        made.close()


def prompts_of(*lengths: int, seed: int = 1) -> list[list[int]]:
    """Random prompts."""
    random = np.random.default_rng(seed)
    return [random.integers(3, 250, length).tolist() for length in lengths]


Make = Callable[..., Any]
