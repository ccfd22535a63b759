"""The guard that detects when a running server's weights are no longer those that keys name.

SGLang keeps no record of an update that comes from tensors, over a group or by IPC. Its registry of
hooks for plug-ins allows to see them: hooks run before the methods that write weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from kvconnect.digest.watch import WeightWatch
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.sglang.server import Server

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


# With these, SGLang itself moves weights about, or unmaps them, while they stay the same.
_MOVING = (
    *("enable_memory_saver", "cpu_offload_gb", "offload_group_size", "enable_paged_experts"),
    *("enable_eplb", "elastic_ep_backend", "enable_elastic_expert_backup", "kt_weight_path"),
    *("weight_cache_mode", "ple_offload_embedding"),
)


class WeightGuard:
    """A guard that detects replacements of the server's weights. Thread-safe.

    It has three sources: the methods by which SGLang replaces weights (see `Updates`), the settings
    that name the weights, and the model's parameters. The last are left out if SGLang moves weights
    itself.

    Args:
        server: whose weights count. Without a server nothing is found.
        is_named: ``model_revision`` stands for the weights as they are now.

    Raises:
        ConfigurationError: weights may have been replaced before, or may be replaced unseen.
    """

    def __init__(self, server: Server, *, is_named: bool) -> None:
        self._server = server
        self._settings = server.weights()
        self._lock = threading.Lock()
        self._watch: WeightWatch | None = None
        self._found: str | None = None
        if server.is_there:
            is_hooked = updates.hook(is_starting=server.is_starting)
            if not is_named:
                _refuse_unseen(server, is_hooked=is_hooked)
        self._begun = updates.number
        self._may_hold_older = server.is_there and not (updates.since_start and not self._begun)

    def refuse_older_pages(self, pool: Any) -> None:
        """Refuses a server that holds pages which earlier weights may have computed.

        Args:
            pool: SGLang's host pool.

        Raises:
            ConfigurationError: weights may have been replaced, and pages are held.
        """
        tree = getattr(self._server.scheduler, "tree_cache", None)
        if not self._may_hold_older or tree is None:
            return
        held = tree.total_size()
        in_host = pool.size - pool.available_size()
        if in_host or (sum(held) if isinstance(held, tuple) else held):
            raise ConfigurationError(
                "model_revision: cannot name pages that the server has computed before, perhaps "
                "with other weights; flush its cache (POST /flush_cache), then attach the storage"
            )

    def change(self) -> str | None:
        """Returns how the weights were replaced, or ``None``. Blocks for a few page reads."""
        if not self._server.is_there:
            return None
        with self._lock:
            if self._found is None:
                self._found = self._change()
            return self._found

    def _change(self) -> str | None:
        if updates.number != self._begun:
            return updates.last
        if self._server.weights() != self._settings:
            return "the server's settings name others"
        model = getattr(self._server.runner, "model", None)
        if not isinstance(model, torch.nn.Module) or any(map(self._server.is_set, _MOVING)):
            return None
        first = next(model.parameters(), torch.empty(0))
        with torch.cuda.device(first.get_device()):  # -1 in host memory: no device
            if self._watch is None:
                # From the first call on: by then the server has finished its start. Buffers are
                # left out, since SGLang lengthens tables of positions while it runs.
                self._watch = WeightWatch.of(model, buffers=False)
            return self._watch.changed()


def _refuse_unseen(server: Server, *, is_hooked: bool) -> None:
    if not is_hooked:
        raise ConfigurationError(
            "model_revision: is missing, and this SGLang has no hooks on updates of its weights "
            "(kvconnect was tested with 0.5.23): name weights that stay as long as the server runs"
        )
    if not updates.since_start or updates.number:
        raise ConfigurationError(
            "model_revision: is missing, and this storage is attached to a running server, whose "
            "weights may have been replaced before: name the weights that it has now, or give the "
            "storage when the server starts"
        )
    if not isinstance(getattr(server.runner, "model", None), torch.nn.Module):
        raise ConfigurationError(
            "model_revision: is missing, and the model of this server cannot be watched: name "
            "weights that stay as long as the server runs"
        )
