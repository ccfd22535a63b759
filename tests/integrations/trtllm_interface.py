"""TensorRT-LLM's connector interface, as its public sources of 1.2 to 1.4 have it: names and forms.

Kept as data, since TensorRT-LLM itself cannot be installed here; and a small runtime that calls a
connector as ``shared/spec/connector.md`` §5 counts it, written from that.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

SCHEDULER = {
    "__init__": ("llm_args",),
    "build_connector_meta": ("scheduler_output",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "request_finished": ("request", "cache_block_ids"),
    "update_state_after_alloc": ("request", "block_ids"),
}
"""Abstract methods and the constructor: parameters after ``self``, none of which has a default."""

WORKER = {
    "__init__": ("llm_args",),
    "get_finished": ("finished_gen_req_ids", "started_loading_req_ids"),
    "register_kv_caches": ("kv_cache_tensor",),
    "save_kv_layer": ("layer_idx", "stream"),
    "start_load_kv": ("stream",),
    "wait_for_layer_load": ("layer_idx", "stream"),
    "wait_for_save": ("stream",),
}

WORKER_CONCRETE = {
    "bind_connector_meta": ("metadata",),
    "get_connector_meta": (),
    "register_forward_pass_callable": (),
}
"""What the worker's base class implements, and the runtime calls."""

REQUEST_DATA = {
    "1.2": (
        "request_id",
        "new_tokens",
        "new_block_ids",
        "computed_position",
        "num_scheduled_tokens",
    ),
    "1.4": (
        *("request_id", "new_tokens", "new_block_ids", "computed_position"),
        *("num_scheduled_tokens", "block_hashes", "priorities", "cache_salt"),
        "new_block_ids_by_layer_group",
    ),
}


def _abstract(names: tuple[str, ...]) -> dict[str, object]:
    def missing(self, *args):
        raise NotImplementedError

    return {name: abstractmethod(missing) for name in names}


class _Base(ABC):  # noqa: B024  its subclasses have abstract methods
    def __init__(self, llm_args):
        self._llm_args = llm_args
        self._metadata = None
        super().__init__()


class _WorkerBase(_Base):
    def bind_connector_meta(self, metadata):
        self._metadata = metadata

    def get_connector_meta(self):
        return self._metadata

    def register_forward_pass_callable(self):
        return None


def _without_init(names):
    return tuple(name for name in names if name != "__init__")


KvCacheConnectorScheduler = type(
    "KvCacheConnectorScheduler", (_Base,), _abstract(_without_init(SCHEDULER))
)
KvCacheConnectorWorker = type(
    "KvCacheConnectorWorker", (_WorkerBase,), _abstract(_without_init(WORKER))
)


@dataclass
class RequestData:
    """As of 1.2, with nothing beyond."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


class Request:
    """What a connector sees of a request."""

    def __init__(self, request_id, tokens, **more):
        self.request_id = request_id
        self.prompt_len = len(tokens)
        self._tokens = list(tokens)
        vars(self).update(more)

    def get_tokens(self, beam):
        assert beam == 0
        return list(self._tokens)

    def append(self, token):
        self._tokens.append(token)


class Runtime:
    """Drives a pair over a pool in which the KV of a token is a function of it and its position."""

    def __init__(self, scheduler, worker, pool, tokens_per_block):
        self.scheduler, self.worker = scheduler, worker
        self.pool, self.size = pool, tokens_per_block
        self.free = list(range(pool.shape[0]))
        self.computed = {}
        worker.register_kv_caches(pool)

    def kv(self, tokens, position):
        """What a forward pass writes for one token: it depends on all before, as in a model."""
        seen = hash(tuple(tokens[: position + 1])) % 1_000_003
        return torch.arange(self.pool[0, :, :, :1].numel()).reshape(self.pool.shape[1:3]) + seen

    def run(self, request, max_tokens, *, chunk=10_000, matched=0, abort_after=None):
        """One request from its admission to its end; how many tokens were computed."""
        asked, is_async = self.scheduler.get_num_new_matched_tokens(request, matched)
        assert isinstance(asked, int)
        assert not is_async
        assert asked % self.size == 0
        assert matched + asked < request.prompt_len
        longest = request.prompt_len + max_tokens
        blocks = [self.free.pop() for _ in range(-(-longest // self.size))]
        held = -(-request.prompt_len // self.size)
        self.scheduler.update_state_after_alloc(request, blocks[:held])
        position, known_tokens, known_blocks, external = matched + asked, 0, 0, asked
        steps, computed = 0, 0
        while True:
            tokens = request.get_tokens(0)
            held = max(held, -(-len(tokens) // self.size))
            scheduled = min(len(tokens) - position, chunk)
            data = RequestData(
                request.request_id,
                tokens[known_tokens:],
                blocks[known_blocks:held],
                position - external,
                scheduled,
            )
            known_tokens, known_blocks, external = len(tokens), held, 0
            output = SchedulerOutput()
            (output.cached_requests if steps else output.new_requests).append(data)
            meta = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
            self.worker.bind_connector_meta(meta)
            stream = None
            self.worker.start_load_kv(stream)
            for layer in range(self.pool.shape[1]):
                self.worker.wait_for_layer_load(layer, stream)
                for at in range(position, position + scheduled):
                    block = self.pool[blocks[at // self.size], layer]
                    rows = block.view(block.shape[0], self.size, -1)
                    rows[:, at % self.size] = self.kv(tokens, at)[layer][:, None].to(rows.dtype)
                self.worker.save_kv_layer(layer, stream)
            self.worker.wait_for_save(stream)
            assert self.worker.get_finished([], []) == ([], [])
            position, computed, steps = position + scheduled, computed + scheduled, steps + 1
            self.check(request.get_tokens(0), blocks, position)
            if position == len(tokens):
                request.append((sum(tokens) + len(tokens)) % 250)
            if steps == abort_after or len(tokens) + 1 - request.prompt_len == max_tokens:
                break
        assert self.scheduler.request_finished(request, blocks[:held]) is False
        self.pool[blocks] = -1  # others' from now on
        self.free += blocks
        return computed

    def check(self, tokens, blocks, end):
        """Every position that counts as computed holds the KV of its token."""
        for at in range(end):
            block = self.pool[blocks[at // self.size]]
            rows = block.view(*block.shape[:2], self.size, -1)[:, :, at % self.size]
            expected = self.kv(tokens, at)[:, :, None].to(rows.dtype).expand_as(rows)
            assert torch.equal(rows, expected), f"wrong KV at {at}"


def llm_args(model, tokens_per_block, **more):
    """Of TensorRT-LLM, as far as a connector reads it."""
    cache = SimpleNamespace(
        tokens_per_block=tokens_per_block, dtype="auto", enable_block_reuse=True
    )
    settings = {
        "model": str(model),
        "kv_cache_config": cache,
        "kv_connector_config": SimpleNamespace(connector_module="kvconnect.integrations.trtllm"),
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
    }
    return SimpleNamespace(**settings | more)
