"""TensorRT-LLM's connector interface, as its public sources of 1.2 to 1.4, and main's, have it.

Names, parameters, fields and their defaults are kept as data, since TensorRT-LLM itself cannot be
installed here; and a small runtime that calls a connector as ``shared/spec/connector.md`` §5 counts
it, written from that. "main" is what the newest sources that could be read have (of autumn 2026)
and 1.4 lacks.

Not recorded: which release is the first with a later form (the sources that could be read are
commits between releases).
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from dataclasses import field, make_dataclass
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import ConfigDict, create_model

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

SCHEDULER_MAIN = {
    "request_finished_by_layer_group": ("request", "cache_block_ids_by_layer_group"),
    "update_state_after_alloc_by_layer_group": ("request", "block_ids_by_layer_group"),
    "wait_for_initialization": (),
    "request_reset": ("request",),
    "reserve_prefix": ("request", "num_computed_tokens", "reservation_id"),
    "release_prefix_reservation": ("request", "reservation_id", "start", "end"),
    "cancel_load": ("request", "start", "end"),
}
"""What main's runtime calls besides, each with a default or only if a class has it.

With one layer group the flat methods are called. A class that overrides a grouped form alone is
given a flat one that refuses, and one that has the flat form alone is refused at start-up with
several groups. ``reserve_prefix``, ``release_prefix_reservation`` and the worker's
``get_finished_prefix_loads`` come together or not at all: without them nothing is reserved, and
``get_num_new_matched_tokens`` is asked as before. ``cancel_load`` is needed for
``aggressive_prefix_budgeting`` only.
"""

WORKER_MAIN = {
    "register_kv_cache_layout": ("layout",),
    "get_finished_prefix_loads": (),
}
"""As `SCHEDULER_MAIN`. The default of the first hands ``register_kv_caches`` the tensor that is all
of the layout, or refuses."""

PREFIX_LOAD_MAIN = (
    *("reservation_id", "request_id", "start", "end"),
    *("tokens", "cache_salt", "block_ids_by_layer_group"),
)
"""What can be read of an entry of ``SchedulerOutput.prefix_loads``."""

REQUIRED = object()

_REQUEST_DATA: dict[str, object] = dict.fromkeys(
    (
        *("request_id", "new_tokens", "new_block_ids"),
        *("computed_position", "num_scheduled_tokens"),
    ),
    REQUIRED,
)
_NEWER = _REQUEST_DATA | {"block_hashes": [], "priorities": None, "cache_salt": None}

REQUEST_DATA: dict[str, dict[str, object]] = {
    "1.2": _REQUEST_DATA,
    "between": _REQUEST_DATA | {"priorities": None, "cache_salt_id": None},
    "1.4": _NEWER | {"new_block_ids_by_layer_group": {}},
    "main": _NEWER | {"new_block_ids_by_layer_group": []},
}
"""Fields of ``RequestData`` in their order, with their defaults; an empty one is made anew.

``priorities`` are those of the new blocks, and None if the request has no retention configuration.
``block_hashes`` are numbers, of all full blocks so far. ``new_block_ids_by_layer_group`` is by the
group's number, empty under the first cache manager; main has a list in its place. Under the second
one ``block_hashes`` is empty and ``priorities`` None. In all lists of ids -1 stands in the place of
a block that a window has passed.
"""

SCHEDULER_OUTPUT: dict[str, object] = {"new_requests": [], "cached_requests": []}

SCHEDULER_OUTPUT_MAIN = SCHEDULER_OUTPUT | {"attention_dp_rank": None, "prefix_loads": []}

_CLASSES = ("connector_module", "connector_scheduler_class", "connector_worker_class")
_OPTIONAL = dict.fromkeys(("connector", *_CLASSES, "server_url"))

CONNECTOR_CONFIG: dict[str, dict[str, object]] = {
    "1.2": dict.fromkeys(_CLASSES, REQUIRED),
    "1.4": _OPTIONAL,
    "main": _OPTIONAL | {"aggressive_prefix_budgeting": False},
}
"""Fields of ``KvCacheConnectorConfig`` with their defaults; it refuses all others."""


def _data_class(name: str, fields: dict[str, object]) -> Any:
    def described(default: object) -> Any:
        if default is REQUIRED:
            return field()
        return field(default_factory=type(default)) if default is not None else field(default=None)

    return make_dataclass(name, [(one, Any, described(default)) for one, default in fields.items()])


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


RequestData = {form: _data_class("RequestData", data) for form, data in REQUEST_DATA.items()}
SchedulerOutput = _data_class("SchedulerOutput", SCHEDULER_OUTPUT)
SchedulerOutputMain = _data_class("SchedulerOutput", SCHEDULER_OUTPUT_MAIN)


def layout_of(pool, tokens_per_block, *, groups=1, regions=1, has_tensor=True):
    """Main's ``KvCacheLayout`` of `pool`, in so many groups and regions of each.

    Not in all sources: ``as_single_pool_tensor()``, which gives the tensor or None, ``dtype`` and
    ``gpu_pool_mapping_bytes``, ``replicated_regions`` of a group.
    """
    region = SimpleNamespace(base=0, size=0, stride=0, num_slots=pool.shape[0], buffers=())
    made = SimpleNamespace(
        tokens_per_block=tokens_per_block,
        groups=tuple(
            SimpleNamespace(
                layer_group_id=number, layer_ids=(), window_size=None, regions=(region,) * regions
            )
            for number in range(groups)
        ),
    )
    if has_tensor:
        made.as_single_pool_tensor = lambda: pool if (groups, regions) == (1, 1) else None
    return made


class Request:
    """What a connector sees of a request; `priority` is that of its retention configuration."""

    def __init__(self, request_id, tokens, priority=None, **more):
        self.request_id = request_id
        self.prompt_len = len(tokens)
        self.priority = priority
        self._tokens = list(tokens)
        vars(self).update(more)

    def get_tokens(self, beam):
        assert beam == 0
        return list(self._tokens)

    def append(self, token):
        self._tokens.append(token)


class Runtime:
    """Drives a pair over a pool in which the KV of a token is a function of it and its position.

    Args:
        form: of `REQUEST_DATA`, what a step reports of a request. From 1.4 on blocks are taken for
            one chunk after the other, and later ones are reported with their chunks.
        window: tokens that attention reaches back; blocks before them go to others, and have -1.

    Attributes:
        metas: what the scheduler built for each step.
    """

    def __init__(self, scheduler, worker, pool, tokens_per_block, form="1.2", window=None):
        self.scheduler, self.worker = scheduler, worker
        self.pool, self.size, self.form, self.window = pool, tokens_per_block, form, window
        self.metas = []
        self.free = list(range(pool.shape[0]))
        self.computed = {}
        if form == "main":
            worker.register_kv_cache_layout(layout_of(pool, tokens_per_block))
        else:
            worker.register_kv_caches(pool)

    def kv(self, tokens, position):
        """What a forward pass writes for one token: it depends on all before, as in a model."""
        seen = hash(tuple(tokens[: position + 1])) % 1_000_003
        return torch.arange(self.pool[0, :, :, :1].numel()).reshape(self.pool.shape[1:3]) + seen

    def run(
        self,
        request,
        max_tokens,
        *,
        chunk=10_000,
        matched=0,
        abort_after=None,
        reset_after=None,
        asks_again=True,
        tells=True,
    ):
        """One request from its admission to its end; how many tokens were computed.

        With `reset_after`, after so many steps its pages go to others, and it is new again. Then,
        with `asks_again`, it is asked what there is of it in the store, and, with `tells`,
        ``request_reset`` was called before, as in main.
        """
        self.longest = request.prompt_len + max_tokens
        blocks, position, external = self.admit(request, chunk, matched)
        known_tokens = known_blocks = steps = computed = in_this_life = 0
        while True:
            if steps == reset_after:
                reset_after = None
                self.give_back(blocks)
                if tells:
                    self.scheduler.request_reset(request)
                if asks_again:
                    blocks, position, external = self.admit(request, chunk, 0)
                else:
                    blocks, position, external = self.take(request), 0, 0
                known_tokens = known_blocks = in_this_life = 0
            tokens = request.get_tokens(0)
            scheduled = min(len(tokens) - position, chunk)
            least = 0 if self.chunked else request.prompt_len
            held = max(known_blocks, -(-max(position + scheduled, least) // self.size))
            self.pass_by(blocks, position, held)
            data = RequestData[self.form](
                request.request_id,
                tokens[known_tokens:],
                blocks[known_blocks:held],
                position - external,
                scheduled,
                **self.more(request, blocks[known_blocks:held], tokens[: position + scheduled]),
            )
            known_tokens, known_blocks, external = len(tokens), held, 0
            self.step(request, data, blocks, position, is_new=not in_this_life)
            in_this_life += 1
            position, computed, steps = position + scheduled, computed + scheduled, steps + 1
            self.check(request.get_tokens(0), blocks, position)
            if position == len(tokens):
                request.append((sum(tokens) + len(tokens)) % 250)
            if steps == abort_after or len(tokens) + 1 - request.prompt_len == max_tokens:
                break
        assert self.scheduler.request_finished(request, blocks[:held]) is False
        self.give_back(blocks)
        return computed

    @property
    def chunked(self):
        return self.form in {"1.4", "main"}

    def admit(self, request, chunk, matched):
        """Asks the connector, and takes blocks: those, the position, and what was promised."""
        asked, is_async = self.scheduler.get_num_new_matched_tokens(request, matched)
        assert isinstance(asked, int)
        assert not is_async
        assert asked % self.size == 0
        assert matched + asked < len(request.get_tokens(0))
        blocks = self.take(request)
        self.pass_by(blocks, matched + asked, len(blocks))
        first = len(request.get_tokens(0))
        if self.chunked:
            first = min(first, matched + asked + chunk)
        self.scheduler.update_state_after_alloc(request, blocks[: -(-first // self.size)])
        return blocks, matched + asked, asked

    def take(self, request):
        """Blocks for all that the request may become."""
        return [self.free.pop(0) for _ in range(-(-self.longest // self.size))]

    def pass_by(self, blocks, position, held):
        """Gives back the blocks of the first `held` that no token from `position` on reads."""
        if self.window is not None:
            passed = max(0, position - self.window + 1) // self.size
            self.give_back([one for one in blocks[: min(passed, held)] if one >= 0])
            blocks[: min(passed, held)] = [-1] * min(passed, held)

    def give_back(self, blocks):
        held = [one for one in blocks if one >= 0]
        self.pool[held] = -1  # others' from now on
        self.free += held

    def step(self, request, data, blocks, position, *, is_new):
        """One step of one request."""
        output = SchedulerOutputMain() if self.form == "main" else SchedulerOutput()
        (output.new_requests if is_new else output.cached_requests).append(data)
        meta = pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output)))
        self.metas.append(meta)
        self.worker.bind_connector_meta(meta)
        stream, tokens = None, request.get_tokens(0)
        self.worker.start_load_kv(stream)
        for layer in range(self.pool.shape[1]):
            self.worker.wait_for_layer_load(layer, stream)
            for at in range(position, position + data.num_scheduled_tokens):
                block = self.pool[blocks[at // self.size], layer]
                rows = block.view(block.shape[0], self.size, -1)
                rows[:, at % self.size] = self.kv(tokens, at)[layer][:, None].to(rows.dtype)
            self.worker.save_kv_layer(layer, stream)
        self.worker.wait_for_save(stream)
        assert self.worker.get_finished([], []) == ([], [])

    def more(self, request, new_blocks, tokens):
        """What the form has beyond 1.2."""
        number = hash(tuple(tokens)) & (1 << 64) - 1
        values = {
            "priorities": None
            if request.priority is None
            else [request.priority] * len(new_blocks),
            "cache_salt": getattr(request, "cache_salt", None),
            "cache_salt_id": getattr(request, "cache_salt_id", None),
            "block_hashes": [number ^ at for at in range(len(tokens) // self.size)],
            "new_block_ids_by_layer_group": [list(new_blocks)]
            if self.form == "main"
            else {0: list(new_blocks)},
        }
        return {name: values[name] for name in REQUEST_DATA[self.form] if name in values}

    def check(self, tokens, blocks, end):
        """Every position that counts as computed holds the KV of its token."""
        for at in range(end):
            if blocks[at // self.size] < 0:
                continue  # passed by a window
            block = self.pool[blocks[at // self.size]]
            rows = block.view(*block.shape[:2], self.size, -1)[:, :, at % self.size]
            expected = self.kv(tokens, at)[:, :, None].to(rows.dtype).expand_as(rows)
            assert torch.equal(rows, expected), f"wrong KV at {at}"


def connector_config(version):
    """A model class with the recorded fields, as strict as TensorRT-LLM's."""
    fields = {
        name: (str, ...)
        if default is REQUIRED
        else (bool if default is False else str | None, default)
        for name, default in CONNECTOR_CONFIG[version].items()
    }
    return create_model("KvCacheConnectorConfig", __config__=ConfigDict(extra="forbid"), **fields)


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
