"""A worker that vLLM drives as its own, on any machine: vLLM's KV cache tensors, but no model.

The stock wheel has no kernels for a CPU. Everything of vLLM but the forward pass is real here: the
engine core, its scheduler, the tensors, and the calls of the connector by the model runner.

The "KV" of a token is numbers made of the token and of all KV that it attends to, as read from the
tensors; the next token is made of the KV of the last. So one wrong element of one block that is
used changes an answer. `answer_of` is the same without tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from typing_extensions import override
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
    has_kv_transfer_group,
)
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import get_kv_connector
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

PRIME = 1_000_003
STATE = "state"
"""In place of a window: the layer is recurrent."""
Window = int | str | None
_LAYER = 4096  # more than the elements of a token in a layer
_WEIGHTS = np.random.default_rng(11).integers(1, PRIME, 1 << 14)


def kv_of(state: int, layer: int, elements: int) -> np.ndarray:
    """What is written for one token in one layer: numbers that float32 has exactly."""
    return state + layer * _LAYER + np.arange(elements)


def seen(rows: np.ndarray) -> np.ndarray:
    """``[tokens, elements]`` as one number for each token, in which every element counts."""
    whole = np.nan_to_num(rows.astype(np.float64), nan=-1.0).astype(np.int64)
    return (whole * np.arange(1, rows.shape[1] + 1)).sum(-1) % PRIME


def next_state(token: int, before: Sequence[tuple[int, np.ndarray]]) -> int:
    """What a token's KV is made from.

    Args:
        token: itself.
        before: for each layer the first position that it attends to, and what is `seen` from there
            up to the token before it.
    """
    state = token * 31 + 7
    for first, numbers in before:
        state += int((_WEIGHTS[first : first + len(numbers)] * numbers % PRIME).sum())
    return state % PRIME


def after(recurrent: np.ndarray, written: np.ndarray) -> np.ndarray:
    """The state of a recurrent layer after one more token, whose "KV" is `written`."""
    return (recurrent * 3 + written) % PRIME


def as_seen(recurrent: np.ndarray, layer: int) -> tuple[int, np.ndarray]:
    """What the next token sees of a state, in the form of `next_state`."""
    return layer, seen(recurrent[None])


def sampled(state: int) -> int:
    return 3 + state % 247


def answer_of(
    prompt: Sequence[int], num_tokens: int, windows: Sequence[Window], elements: int
) -> list[int]:
    """What an engine must answer, without any engine.

    Args:
        prompt: its tokens.
        num_tokens: of the answer.
        windows: of each layer.
        elements: of a token in a layer.
    """
    tokens = list(prompt)
    numbers: list[list[int]] = [[] for _ in windows]
    recurrent = [np.zeros(elements, np.int64) for _ in windows]
    while True:
        for position in range(len(numbers[0]), len(tokens)):
            before = []
            for layer, (window, column) in enumerate(zip(windows, numbers, strict=True)):
                start = max(0, position - window + 1) if isinstance(window, int) else 0
                attended = start, np.array(column[start:], dtype=np.int64)
                before.append(as_seen(recurrent[layer], layer) if window == STATE else attended)
            state = next_state(tokens[position], before)
            for layer, column in enumerate(numbers):
                written = kv_of(state, layer, elements)
                column.append(int(seen(written[None])[0]))
                recurrent[layer] = after(recurrent[layer], written)
        if len(tokens) == len(prompt) + num_tokens:
            return tokens[len(prompt) :]
        tokens.append(sampled(state))


def _whole(states: torch.Tensor) -> np.ndarray:
    return np.nan_to_num(states.numpy().astype(np.float64), nan=-1.0).astype(np.int64)


@dataclass(slots=True)
class _Request:
    tokens: list[int]
    prompt_len: int
    blocks: list[list[int]] = field(default_factory=list)
    state_block: int | None = None  # number of the block that has the states, since it was admitted


class StandInWorker(WorkerBase):
    """Selected with ``worker_cls``; heads and their size are the model's.

    ``additional_config["windows"]`` has a number, ``None`` or `STATE` for each layer,
    ``additional_config["layouts"]`` the KV cache layouts that it takes.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        options = vllm_config.additional_config
        self.windows: list[Window] = list(options.get("windows", (None,) * 3))
        self._layouts: list[str] = list(options.get("layouts", ("LBHNC",)))
        self._heads = self.model_config.get_num_kv_heads(self.parallel_config)
        self._dim = self.model_config.get_head_size()
        self.elements = self._heads * 2 * self._dim
        self._requests: dict[str, _Request] = {}
        self._output: ModelRunnerOutput | None = None
        self.caches: dict[str, torch.Tensor] = {}

    # ------------------------------------------------------------------ the engine starts and ends

    @override
    def init_device(self) -> None:
        self.device = torch.device("cpu")
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )

    @override
    def load_model(self, **_: Any) -> None:
        """There are no weights but those that connectors watch."""
        self.model = torch.nn.Linear(4, 4)

    @override
    def get_model(self) -> torch.nn.Module:
        return self.model

    def update_config(self, overrides: dict[str, Any]) -> None:
        """Changes nothing; of vLLM's own, nobody knows what loads weights behind it."""

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    @override
    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        size = self.cache_config.block_size
        found: dict[str, KVCacheSpec] = {}
        for layer, window in enumerate(self.windows):
            shape = {"num_kv_heads": self._heads, "head_size": self._dim, "dtype": torch.float32}
            spec = FullAttentionSpec(block_size=size, **shape)
            if window == STATE:
                spec = MambaSpec(
                    block_size=size,
                    shapes=((self.elements,),),
                    dtypes=(torch.float32,),
                    page_size_padded=spec.page_size_bytes,
                    mamba_cache_mode=self.cache_config.mamba_cache_mode,
                )
            elif window is not None:
                spec = SlidingWindowSpec(block_size=size, sliding_window=window, **shape)
            found[f"model.layers.{layer}.self_attn.attn"] = spec
        return found

    @override
    def get_supported_kv_cache_layouts(self) -> list[str]:
        return self._layouts

    def determine_available_memory(self) -> int:
        return 64 << 20

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self._groups = [list(one.layer_names) for one in kv_cache_config.kv_cache_groups]
        self.caches = allocate_kv_cache(
            kv_cache_config, self.device, self.cache_config.get_resolved_kv_cache_layout()
        )
        ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        # As the two model runners do.
        self._is_v2 = self.vllm_config.use_v2_model_runner
        if self._is_v2:
            self._connector = get_kv_connector(self.vllm_config, self.caches)
        elif has_kv_transfer_group():
            get_kv_transfer_group().register_kv_caches(self.caches)

    @override
    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def get_kv_connector_handshake_metadata(self) -> None:
        return None

    @override
    def shutdown(self) -> None:
        ensure_kv_transfer_shutdown()

    # ------------------------------------------------------------------ a step

    @override
    def execute_model(self, scheduler_output: Any) -> ModelRunnerOutput | None:
        self._follow(scheduler_output)
        is_idle = not scheduler_output.total_num_scheduled_tokens
        if self._is_v2:
            if is_idle:
                return self._connector.no_forward(scheduler_output)
            self._connector.pre_forward(scheduler_output)
            output = self._compute(scheduler_output)
            self._connector.finish_forward()
            told = self._connector.post_forward(scheduler_output.finished_req_ids)
        else:
            mixin = KVConnectorModelRunnerMixin
            if has_kv_transfer_group():
                get_kv_transfer_group().handle_preemptions(scheduler_output.kv_connector_metadata)
            if is_idle:
                if not has_kv_transfer_group():
                    return EMPTY_MODEL_RUNNER_OUTPUT
                return mixin.kv_connector_no_forward(scheduler_output, self.vllm_config)
            with (
                set_forward_context(None, self.vllm_config),
                mixin.maybe_get_kv_connector_output(scheduler_output) as told,
            ):
                output = self._compute(scheduler_output)
        output.kv_connector_output = told
        self._output = output
        return None

    @override
    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        output, self._output = self._output, None
        assert output is not None
        return output

    def _follow(self, output: Any) -> None:
        """What the scheduler tells of requests and their blocks."""
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids
            self._requests[new.req_id] = _Request(
                list(tokens), len(new.prompt_token_ids), [list(one) for one in new.block_ids]
            )
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            request, blocks = self._requests[name], cached.new_block_ids[index]
            if name in cached.all_token_ids:
                request.tokens = list(cached.all_token_ids[name])
            # Tokens that were sampled behind a load that failed are none.
            del request.tokens[request.prompt_len + cached.num_output_tokens[index] :]
            if name in cached.resumed_req_ids:
                request.blocks = [list(one) for one in blocks]
                request.state_block = None
            elif blocks is not None:
                for known, more in zip(request.blocks, blocks, strict=True):
                    known.extend(more)
        assert not getattr(output, "kv_cache_block_copies", None)

    def _compute(self, output: Any) -> ModelRunnerOutput:
        computed = {one.req_id: one.num_computed_tokens for one in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        names = list(output.num_scheduled_tokens)
        answers = []
        for name in names:
            request, start = self._requests[name], computed[name]
            end = start + output.num_scheduled_tokens[name]
            assert end <= len(request.tokens), (name, end, len(request.tokens))
            state = self._forward(request, start, end)
            answers.append([sampled(state)] if end == len(request.tokens) else [])
            request.tokens += answers[-1]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=answers,
        )

    def _forward(self, request: _Request, start: int, end: int) -> int:
        """Write the KV of ``tokens[start:end]``; the last one's state."""
        layers = []
        recurrent: dict[int, np.ndarray] = {}
        places: list[tuple[int, torch.Tensor]] = []  # of states, after the step
        for group, layer_names in enumerate(self._groups):
            blocks = np.array(request.blocks[group])
            for name in layer_names:
                number = int(name.split(".")[2])
                if self.windows[number] == STATE:
                    # As vLLM does: the last block of the tokens computed so far has the state.
                    cache = self.caches[name].view(torch.float32)
                    size = self.cache_config.block_size
                    before = request.state_block
                    before = (start - 1) // size if before is None else before
                    states = (
                        torch.zeros(self.elements) if not start else cache[blocks[before], 0, 0]
                    )
                    recurrent[number] = _whole(states)
                    places.append((number, cache[blocks[-(-end // size) - 1], 0, 0]))
                else:
                    layers.append((number, self.windows[number], self.caches[name], blocks))
        request.state_block = -(-end // self.cache_config.block_size) - 1
        firsts = [0 if one is None else max(0, start - one + 1) for _, one, _, _ in layers]
        columns = [
            seen(self._read(cache, blocks, first, start))
            for first, (_, _, cache, blocks) in zip(firsts, layers, strict=True)
        ]
        state = 0
        for position in range(start, end):
            before = [as_seen(one, number) for number, one in recurrent.items()]
            for first, column, (_, window, _, _) in zip(firsts, columns, layers, strict=True):
                low = first if window is None else max(first, position - window + 1)
                before.append((low, column[low - first :]))
            state = next_state(request.tokens[position], before)
            for index, (number, _, cache, blocks) in enumerate(layers):
                written = kv_of(state, number, self.elements)
                self._write(cache, blocks, position, written)
                columns[index] = np.append(columns[index], seen(written[None]))
            for number, one in recurrent.items():
                recurrent[number] = after(one, kv_of(state, number, self.elements))
        for number, place in places:
            place.copy_(torch.from_numpy(recurrent[number]))
        return state

    def _read(self, cache: torch.Tensor, blocks: np.ndarray, start: int, end: int) -> np.ndarray:
        positions = torch.arange(start, end)
        size = cache.shape[2]
        rows = cache[torch.from_numpy(blocks)[positions // size], :, positions % size]
        return rows.reshape(len(positions), self.elements).numpy()

    def _write(
        self, cache: torch.Tensor, blocks: np.ndarray, position: int, written: np.ndarray
    ) -> None:
        size = cache.shape[2]
        row = torch.from_numpy(written).to(torch.float32).view(self._heads, 2 * self._dim)
        cache[int(blocks[position // size]), :, position % size] = row
