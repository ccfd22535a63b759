"""Engines with vLLM's own offloading in the process of the test, one after the other.

Where vLLM has no kernels for this machine, they are around the stand-in for a model.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tiers import prompt_of, tier


@pytest.fixture(scope="session")
def long_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama for prompts of up to 8,192 tokens, whose output bad KV changes."""
    from kvconnect.engine.checkpoint.random_model import make_model  # transformers: seconds

    directory = tmp_path_factory.mktemp("long") / "llama"
    return make_model(
        directory, "llama", num_layers=3, hidden_size=128, max_position_embeddings=8192
    )


class Engine:
    """vLLM's `LLM` with offloading through `offload_on_cpu`; ended by `close`."""

    def __init__(self, *tiers: dict[str, Any], **arguments: Any) -> None:
        import offload_on_cpu
        from vllm import LLM

        extra = {
            "spec_name": "OffloadOnCpu",
            "spec_module_path": "offload_on_cpu",
            "cpu_bytes_to_use": arguments.pop("host_nbytes", 32 << 20),
            "secondary_tiers": list(tiers),
        }
        if find_spec("vllm._C") is None:
            from stand_in_worker import StandInWorker

            arguments["worker_cls"] = f"{StandInWorker.__module__}.{StandInWorker.__name__}"
        self.llm = LLM(
            skip_tokenizer_init=True,
            dtype=arguments.pop("dtype", "float32"),
            enforce_eager=True,
            max_model_len=arguments.pop("max_model_len", 4096),
            block_size=32,  # the smallest that its attention on a CPU has
            disable_log_stats=True,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_connector_module_path": arguments.pop(
                    "connector_from", "kvconnect.integrations.vllm_tier"
                ),
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
            **arguments,
        )
        self.manager = offload_on_cpu.managers[-1]

    @property
    def tier(self) -> Any:
        return self.manager.secondary_tiers[0]

    def answer(self, *prompts: list[int], max_tokens: int = 12, **keywords: Any) -> list[list[int]]:
        """The tokens of each answer; `cached` of this object is how many tokens were found."""
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt, **keywords} for prompt in prompts]
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        self.cached = [output.num_cached_tokens for output in outputs]
        return [list(output.outputs[0].token_ids) for output in outputs]

    def settle(self) -> None:
        """Step until no job is under way; nothing of a request may be left then."""
        core = self.llm.llm_engine.engine_core.engine_core
        for _ in range(100_000):
            if not self.manager.has_pending_work():
                break
            core.step_fn()
        assert not self.manager.has_pending_work()
        assert not core.scheduler.has_unfinished_requests()
        assert not self.manager._jobs
        # vLLM itself forgets the requests of its last step only in the next one.
        known = self.manager._req_state.keys()
        assert len(known) <= 64
        assert not self.tier._jobs
        assert self.tier._lookups._of_request.keys() <= known
        assert self.tier._parents._last.keys() <= known

    def forget_device(self) -> None:
        """Nothing is cached on the device any more, and nothing in vLLM's host memory."""
        assert self.llm.reset_prefix_cache(reset_connector=True)

    def close(self) -> None:
        if not hasattr(self, "llm"):
            return
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.manager
        gc.collect()


MakeEngine = Callable[..., Engine]


@pytest.fixture
def engine(long_llama: Path) -> Iterator[MakeEngine]:
    """Makes engines with these tiers; only one at a time, whose predecessor is closed."""
    made: list[Engine] = []

    def make(*tiers: dict[str, Any], **arguments: Any) -> Engine:
        close()
        made.append(Engine(*tiers, **{"model": str(long_llama), **arguments}))
        return made[0]

    def close() -> None:
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        while made:
            made.pop().close()
        ensure_kv_transfer_shutdown()  # of an engine that was refused, the worker's half is left

    yield make
    close()


@pytest.fixture
def prompt() -> list[int]:
    """600 tokens: 18 blocks of 32, and a rest."""
    return prompt_of(600, seed=1)


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """The directory of a store, and what the engine answered that has filled it, once one has."""
    return tmp_path_factory.mktemp("filled") / "store", []


@pytest.fixture
def cold(
    engine: MakeEngine, prompt: list[int], filled: tuple[Path, list[int]], tmp_path: Path
) -> list[int]:
    """What a first engine answered to `prompt`, which is in the store of `tmp_path`."""
    directory, answer = filled
    if not answer:
        first = engine(tier(directory))
        answer += first.answer(prompt)[0]
        first.settle()
        first.close()
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    return answer
