"""The ways in which SGLang replaces the weights of a running server, and a count of uses.

SGLang keeps no record of an update that comes from tensors, over a group or by IPC. Its registry of
hooks for plug-ins allows to see them: hooks run before the methods that write weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

_RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater"
_SCHEDULER = "sglang.srt.managers.scheduler_components.weight_updater"
REGISTRY = "sglang.srt.plugins.hook_registry"
"""The module of SGLang's hooks for plug-ins."""

WRITES = (
    *("begin_weight_update", "update_weights_from_disk", "load_weights_from_distributed"),
    *("update_weights_from_tensor", "update_weights_from_ipc"),
)
"""Methods of ``WeightUpdater``, of which each model has one, that write weights."""
RELEASES = "release_memory_occupation"
"""The method of ``SchedulerWeightUpdaterManager`` that frees the memory of weights."""


_Place = tuple[str, type, str, Callable[..., None]]  # module, class, method, and its hook


class Updates:
    """Counts how often the weights of this process's target model were replaced. Thread-safe.

    Attributes:
        number: the number of replacements.
        last: how the weights were replaced last; empty if they never were.
        since_start: no replacement can have been missed.
    """

    def __init__(self) -> None:
        self.number = 0
        self.last = ""
        self.since_start = False
        self._lock = threading.Lock()
        self._hooked: object = None

    def hook(self, *, is_starting: bool) -> bool:
        """Counts replacements from now on. Returns False if this SGLang has no hooks.

        Args:
            is_starting: the server has not replaced weights yet.
        """
        try:
            registry = import_module(REGISTRY)
            updater = import_module(_RUNNER).WeightUpdater
            manager = import_module(_SCHEDULER).SchedulerWeightUpdaterManager
        except (ImportError, AttributeError):
            return False
        with self._lock:
            if self._hooked is not updater:
                places: list[_Place] = [
                    *((_RUNNER, updater, name, self._note_write) for name in WRITES),
                    (_SCHEDULER, manager, RELEASES, self._note_release),
                ]
                if not _register(registry, places):
                    return False
                self._hooked, self.since_start = updater, is_starting
                self.number, self.last = 0, ""
        return True

    def note(self, how: str) -> None:
        """Counts a replacement."""
        with self._lock:
            self.number += 1
            self.last = how

    def _note_write(self, updater: Any, *_: Any, **__: Any) -> None:
        runner = getattr(updater, "get_model_runner", lambda: None)()
        if not getattr(runner, "is_draft_worker", False):
            self.note("SGLang was asked to replace them")

    def _note_release(self, manager: Any, request: Any = None, *_: Any, **__: Any) -> None:
        tags = getattr(request, "tags", None)
        adapter = getattr(manager, "memory_saver_adapter", None)
        frees = getattr(adapter, "enabled", True) and not _has_backup()
        if frees and (not tags or "weights" in tags):
            self.note("SGLang freed their memory, and keeps no copy (--enable-weights-cpu-backup)")


def _register(registry: Any, places: list[_Place]) -> bool:
    """Registers a hook before each method; False if a method has been hooked by others."""
    before = [getattr(cls, name, None) for _, cls, name, _ in places]
    for module, cls, name, hook in places:
        registry.HookRegistry.register(
            f"{module}.{cls.__name__}.{name}", hook, registry.HookType.BEFORE
        )
    registry.HookRegistry.apply_hooks()
    after = [getattr(cls, name, None) for _, cls, name, _ in places]
    return all(
        then is not None and then is not now for then, now in zip(before, after, strict=True)
    )


def _has_backup() -> bool:
    """Returns whether SGLang keeps a copy of weights whose memory it frees."""
    try:
        context = import_module("sglang.srt.runtime_context").get_context()
        return bool(context.config_leaf("enable_weights_cpu_backup"))
    except (ImportError, AttributeError, ValueError):
        return False


updates = Updates()
"""The updates of this process, which has one server."""
