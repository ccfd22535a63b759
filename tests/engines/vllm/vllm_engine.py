"""A real vLLM engine with `KvConnect`, its core in this process or in one of its own."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import inside
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

CORE_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of `inside`
}


def connector(url: str, **extra: Any) -> dict[str, Any]:
    """The configuration of `KvConnect`; names in capitals of vLLM's own fields in small ones."""
    own = {name.lower(): extra.pop(name) for name in list(extra) if name.isupper()}
    return {
        "kv_connector": "KvConnect",
        "kv_connector_module_path": "kvconnect.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "url": url,
            "lookup_timeout_ms": 60_000,
            "load_decisions": False,
            **extra,
        },
        **own,
    }


@dataclass
class Answer:
    tokens: list[int]
    cached: int
    reason: str | None


class Engine:
    """An engine, and what a test asks of it."""

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any] | None,
        *,
        core_process: bool = False,
        **options: Any,
    ) -> None:
        self._core_process = core_process
        if core_process and transfer is not None:
            transfer = transfer | {"kv_connector_module_path": inside.__name__}
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

    def inside(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function of the module `inside` says in each process."""
        if not self._core_process:
            return [function(inside.Inside.of_core(self.core, alone=False), *arguments)]
        call = self.llm.llm_engine.engine_core.call_utility
        in_core = call(inside.UTILITY, function, arguments)
        return [in_core, *self.llm.collective_rpc(inside.in_worker, args=(function, arguments))]

    @property
    def core(self) -> Any:
        """If it is in this process, as is what hangs on it below."""
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

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: Sequence[list[int]],
        cached: Sequence[int],
        **more: Any,
    ) -> None:
        """Answers are these `tokens`, with so many tokens of each prompt `cached`."""
        answers = self.answer(prompts, **more)
        assert [one.tokens for one in answers] == list(tokens)
        assert [one.cached for one in answers] == list(cached)

    def tokens(self, prompts: Sequence[Sequence[int]], num_tokens: int = 8, **more: Any):
        return [one.tokens for one in self.answer(prompts, num_tokens, **more)]

    def submit(self, prompts: Sequence[Sequence[int]], num_tokens: int, **more: Any) -> list[str]:
        """Their names, as in outputs."""
        params = vllm.SamplingParams(
            max_tokens=num_tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        names = []
        for prompt in prompts:
            self._numbers += 1
            name = f"test-{self._numbers}"
            asked = {"prompt_token_ids": list(prompt)}
            self.llm.llm_engine.add_request(name, asked, params, **more)
            names.append(name)
        return names

    def step(self, found: dict[str, list[int]]) -> None:
        """One step; what ended is added to `found`."""
        for output in self.llm.llm_engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)

    def forget_device(self) -> None:
        """Empties the device's own prefix cache: what is cached then comes from a store.

        Requests that ended may keep their blocks until staging memory is free, and vLLM gives them
        back in a step, which an idle engine does not make.
        """
        self.settle()
        assert self.llm.reset_prefix_cache()

    def flush(self) -> None:
        """Until all that was saved is in the store."""
        self.inside(inside.flush)

    def settle(self) -> None:
        """Let requests that ended, but whose blocks are kept, go."""
        until = time.monotonic() + 60
        while any(self.inside(inside.is_busy)) and time.monotonic() < until:
            if not self._core_process:
                self.core.step_fn()

    def check_empty(self) -> None:
        """No request, and no block, is left of anything."""
        self.settle()
        left = self.inside(inside.left)
        assert not any(value for one in left for value in one.values()), left

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()


@contextmanager
def engine(
    model: Path, transfer: dict[str, Any] | None, *, core_process: bool = False, **options: Any
) -> Iterator[Engine]:
    """An engine that is empty when it ends, and then shut down."""
    environment = CORE_PROCESS if core_process else {}
    with patch.dict(os.environ, environment):
        made = Engine(model, transfer, core_process=core_process, **options)
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
