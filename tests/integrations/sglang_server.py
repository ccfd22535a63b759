"""A stand-in for SGLang's server, with a model whose weights can be replaced in all its ways."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from stand_ins import module

_UPDATES = "sglang.srt.model_executor.model_runner_components.weight_updater"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"

WAYS = (
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "load_weights_from_distributed",
    "update_weights_from_ipc",
    "begin_weight_update",
)
"""Methods by which SGLang replaces weights."""


class Context:
    """SGLang's ``RuntimeContext``, as far as it is read."""

    def __init__(self, **settings: object) -> None:
        self.settings = settings

    def config_bag(self, name: str) -> object:
        if not self.settings:
            raise ValueError(f"config namespace {name!r} not published")
        return self

    def config_leaf(self, name: str) -> Any:
        if name not in self.settings:
            raise ValueError(f"{name!r} is not a config leaf (no namespace)")
        return self.settings[name]


class Model(torch.nn.Module):
    """Of SGLang's package; its weights are loaded past the version counter, as there."""

    __module__ = "sglang.srt.models.llama"

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(32, 32)
        self.register_buffer("table", torch.zeros(8))

    def load_weights(self) -> None:
        for parameter in self.parameters():
            parameter.data.copy_(parameter.data + 1)


class HfConfig(SimpleNamespace):
    """A configuration of transformers', after SGLang's changes."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class Worker:
    """SGLang's ``TpModelWorker``, with its ``ModelRunner``."""

    def __init__(self, model_path: str, config: dict[str, Any], **more: Any) -> None:
        hf_config = HfConfig(**config)
        self.model_runner = SimpleNamespace(
            model=Model(),
            is_draft_worker=False,
            model_config=SimpleNamespace(
                hf_config=hf_config,
                hf_text_config=hf_config,
                model_path=model_path,
                is_multimodal=False,
                dtype=torch.float32,
            ),
        )
        vars(self.model_runner.model_config).update(more)


class Server:
    """The process of a server, while its modules are imported from here."""

    def __init__(self, context: Context, worker: Worker) -> None:
        self.context, self.worker = context, worker
        self._classes()
        runner = worker.model_runner
        self.updater = self.WeightUpdater(runner)
        self.draft = self.WeightUpdater(SimpleNamespace(model=Model(), is_draft_worker=True))
        self.manager = self.SchedulerWeightUpdaterManager()
        self.scheduler: Any = None

    def start(self, make: Callable[[], Any]) -> Any:
        """Makes a storage as SGLang does while it starts."""
        self.scheduler = self.Scheduler(self.worker, make)
        return self.scheduler.made

    def attach(self, make: Callable[[], Any]) -> Any:
        """Makes a storage as SGLang does when a running server is asked to."""
        if self.scheduler is None:
            self.scheduler = self.Scheduler(self.worker, lambda: None)
        return self.scheduler.attach(make)

    def _classes(self) -> None:
        class WeightUpdater:
            def __init__(self, runner: Any) -> None:
                self.get_model_runner = lambda: runner

            def _write(self) -> None:
                self.get_model_runner().model.load_weights()

        for name in WAYS:
            setattr(WeightUpdater, name, lambda updater: updater._write())

        class SchedulerWeightUpdaterManager:
            memory_saver_adapter = SimpleNamespace(enabled=False)

            def release_memory_occupation(self, request: Any) -> None:
                """Frees memory."""

        class Scheduler:
            def __init__(self, worker: Worker, make: Callable[[], Any]) -> None:
                self.tp_worker = worker
                self.made = make()
                self.held = (0, 0)
                self.tree_cache = SimpleNamespace(total_size=lambda: self.held)

            def attach(self, make: Callable[[], Any]) -> Any:
                return make()

            def run_batch(self, batch: Any) -> str:
                return f"results of {len(batch.reqs)}"

            def process_batch_result(self, batch: Any, result: str) -> None:
                """Waits for the device."""

        self.WeightUpdater = WeightUpdater
        self.SchedulerWeightUpdaterManager = SchedulerWeightUpdaterManager
        self.Scheduler = Scheduler


class HookType(enum.Enum):
    BEFORE = "before"
    AFTER = "after"


class Hooks:
    """SGLang's ``HookRegistry``: a method is wrapped once."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, Callable[..., Any], HookType]] = []
        self.patched: set[str] = set()

    def register(self, target: str, hook: Callable[..., Any], kind: HookType) -> None:
        self._waiting.append((target, hook, kind))

    def apply_hooks(self) -> None:
        for target, hook, kind in self._waiting:
            if target in self.patched:
                continue
            path, cls, name = target.rsplit(".", 2)
            owner = getattr(sys.modules[path], cls)
            setattr(owner, name, _wrapped(getattr(owner, name), hook, kind))
            self.patched.add(target)
        self._waiting.clear()


def _wrapped(
    original: Callable[..., Any], hook: Callable[..., Any], kind: HookType
) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if kind is HookType.BEFORE:
            assert hook(*args, **kwargs) is None  # or these are arguments
            return original(*args, **kwargs)
        result = original(*args, **kwargs)
        assert hook(result, *args, **kwargs) is None  # or this is the result
        return result

    return wrapper


@contextmanager
def serving(
    model: Path, *, resolved: dict[str, Any] | None = None, hooks: bool = True, **settings: object
) -> Iterator[Server]:
    """This process is a server with these settings, while the block runs.

    Args:
        model: its directory.
        resolved: fields of the ``ModelConfig`` that SGLang made; ``hf_config`` is a dictionary.
        hooks: SGLang has hooks for plug-ins.
        settings: of the server.
    """
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_sglang(name)}
    more = dict(resolved or {})
    path = more.pop("model_path", settings.get("model_path", model))
    worker = Worker(str(path), more.pop("hf_config", {}), **more)
    context = Context(**{"model_path": str(model), "load_format": "auto"} | settings)
    server = Server(context, worker)
    for name in ("sglang", "sglang.srt"):
        module(name, path="")
    module("sglang.srt.runtime_context", get_context=lambda: context)
    module("sglang.srt.managers.scheduler", Scheduler=server.Scheduler)
    module(_UPDATES, WeightUpdater=server.WeightUpdater)
    module(_MANAGER, SchedulerWeightUpdaterManager=server.SchedulerWeightUpdaterManager)
    if hooks:
        module("sglang.srt.plugins.hook_registry", HookRegistry=Hooks(), HookType=HookType)
    try:
        yield server
    finally:
        for name in [name for name in sys.modules if _is_sglang(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_sglang(name: str) -> bool:
    return name.partition(".")[0] == "sglang"
