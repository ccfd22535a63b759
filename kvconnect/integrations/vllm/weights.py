"""The record of the model's weights, whether keys name them, and the calls that replace them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from kvconnect.digest.watch import WeightWatch


@dataclass(frozen=True, slots=True)
class WeightsMeta:
    """The scheduler's record, as workers get it in each step.

    Attributes:
        epoch: number of the name that keys have now. It names the weights that a worker has in the
            first step of this epoch.
        num_resets: the number of resets of vLLM's caches.
        is_stopped: the weights have no name; nothing is loaded or saved.
    """

    epoch: int = 0
    num_resets: int = 0
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class WeightChange:
    """A change that a worker found.

    Attributes:
        epoch: the scheduler's epoch when the worker found the change.
        how: which tensor changed, and how.
        num_resets: the change was found before anything was computed after this reset of vLLM's
            caches. ``None``: something was computed.
    """

    epoch: int
    how: str
    num_resets: int | None


class WeightNames:
    """The scheduler's record of the name of the model's weights in keys.

    The first weights have the name of the model's directory. Replaced weights get a name of this
    process as soon as the device holds nothing that earlier weights computed.

    Attributes:
        meta: for the workers.
        begins_later: the weights get a name as soon as no load runs.
    """

    def __init__(self) -> None:
        self.meta = WeightsMeta()
        self.begins_later = False
        self._is_clean = True  # true if no step computed since the device was empty
        self._reset_was_clean = True

    @property
    def is_stopped(self) -> bool:
        """Returns whether the weights have changed and have no name yet."""
        return self.meta.is_stopped

    def note_step(self) -> None:
        """Records that a step computes or loads something."""
        self._is_clean = False

    def note_reset(self, *, device_is_empty: bool) -> None:
        """Records a reset of vLLM's caches."""
        self.meta = replace(self.meta, num_resets=self.meta.num_resets + 1)
        self._is_clean = self._reset_was_clean = device_is_empty

    def is_news(self, change: WeightChange) -> bool:
        """Returns whether `change` concerns the weights that have a name now."""
        return change.epoch == self.meta.epoch and not self.is_stopped

    def can_begin(self, change: WeightChange | None = None) -> bool:
        """Returns whether the device holds nothing that weights before `change` computed."""
        if change is not None and change.num_resets == self.meta.num_resets:
            return self._reset_was_clean
        return self._is_clean

    def stop(self, *, begins_later: bool) -> None:
        """Records that keys do not name the weights any more.

        Args:
            begins_later: whether the weights get a name as soon as no load runs. If not, they get
                one after a reset of vLLM's caches.
        """
        self.meta = replace(self.meta, is_stopped=True)
        self.begins_later = begins_later

    def begin(self) -> str:
        """Returns a name in keys for the present weights."""
        self.meta = replace(self.meta, epoch=self.meta.epoch + 1, is_stopped=False)
        self.begins_later = False
        return f"weights={secrets.token_hex(16)}"


class WatchedWeights:
    """A worker's record of whether the weights are those that keys name.

    Args:
        model: returns the model runner's model.

    Attributes:
        change: the change that was found since the scheduler named the weights, or ``None``.
    """

    def __init__(self, model: Callable[[], nn.Module]) -> None:
        self._model = model
        self._watched = model()
        # Without buffers: kernels may replace some when the engine warms up.
        self._watch = WeightWatch.of(self._watched, buffers=False)
        self._code = _Code(self._watched)
        self._told: WeightsMeta | None = None
        self.change: WeightChange | None = None

    def begin_step(self, told: WeightsMeta) -> None:
        """Stores the scheduler's record; checks for a change in the first step after a reset."""
        before, self._told = self._told, told
        if before is not None and told.epoch != before.epoch:
            if self.change is None or self.change.num_resets is None:
                self._take()
            self.change = None
        elif before is None or told.num_resets != before.num_resets:
            self.look(num_resets=told.num_resets)
            if before is None or self.change is not None:
                # Steps compute with these before they have a name, and they may change again.
                self._take()

    def look(self, *, num_resets: int | None = None) -> WeightChange | None:
        """Returns the change that was found, perhaps in this call.

        Args:
            num_resets: see `WeightChange`.
        """
        if self.change is None and self._told is not None:
            how = self._watch.changed()
            if how is None and self._model() is not self._watched:
                how = "the model was replaced"
            if how is None:
                how = self._code.changed()
            if how is not None:
                self.change = WeightChange(self._told.epoch, how, num_resets)
        return self.change

    def _take(self) -> None:
        """Takes the present model as the one that later checks compare with."""
        self._watched = self._model()
        self._watch = WeightWatch.of(self._watched)
        self._code = _Code(self._watched)


class _Code:
    """The code of a model's modules as it was found: their classes, ``forward`` and hooks."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._found = self._read()

    def changed(self) -> str | None:
        """Returns which module runs something else, or ``None``."""
        now = self._read()
        if now == self._found:
            return None
        pairs = zip(self._modules, now, self._found, strict=True)
        module = next(module for module, is_now, was in pairs if is_now != was)
        return f"a {type(module).__name__} was patched or hooked"

    def _read(self) -> list[tuple[object, ...]]:
        return [
            (
                type(module),
                type(module).forward,
                (members := module.__dict__).get("forward"),
                len(members["_forward_hooks"]),
                len(members["_forward_pre_hooks"]),
            )
            for module in self._modules
        ]


_CHANGING = frozenset(
    {
        *("checkpoint_restore", "elastic_ep_execute", "finish_weight_update", "handle_ft_command"),
        *("load_model", "reinitialize_distributed", "reload_weights", "reset_weights"),
        *("start_draft_weight_update", "start_weight_update", "update_config", "update_weights"),
    }
)
"""Methods of workers (0.32, 0.33) after which the weights may be others."""

_HARMLESS = frozenset(
    {
        *("add_lora", "adjust_rank", "annotate_profile", "check_health", "checkpoint_prepare"),
        *("compile_or_warm_up_model", "compute_weight_checksums", "determine_available_memory"),
        *("discard", "execute_dummy_batch", "execute_model", "get_cache_block_size_bytes"),
        *("get_compilation_match_table", "get_encoder_timing_stats", "get_kv_cache_spec"),
        *("get_kv_connector_handshake_metadata", "get_model_inspection"),
        *("get_simple_cpu_offload_num_cpu_blocks", "get_supported_kv_cache_layouts"),
        *("get_supported_tasks", "init_weight_transfer_engine", "initialize_from_config"),
        *("list_loras", "pin_lora", "profile", "release_late_interaction_query_cache"),
        *("remove_lora", "reset_encoder_cache", "reset_mm_cache", "sample_tokens"),
        *("save_sharded_state", "save_tensorized_model", "set_kv_cache_layout", "shutdown"),
        *("shutdown_weight_transfer_engine", "supports_draft_weight_updates"),
        *("synchronize_device", "take_draft_token_ids", "update_environment_variables"),
        *("update_max_model_len", "wake_up"),
    }
)
"""Methods of workers (0.32, 0.33) that leave the weights as they are."""

_DISCARDS = 2  # the level of sleep that discards the weights


def _given(arguments: Sequence[Any], named: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the positional arguments that ``collective_rpc`` passes on to the workers."""
    found: Sequence[Any] = named.get("args") or (arguments[1] if len(arguments) > 1 else ())
    return found


class WeightCalls:
    """Reports calls of an engine core to its workers that change the weights, and others.

    Replaces ``collective_rpc`` of one executor, which all such calls use, until `close`. Belongs to
    the core's thread.

    Args:
        executor: vLLM's.
        changed: called with a sentence's beginning, such as "reload_weights() was called", before
            the workers are.
        reports_unknown: also report methods and functions that may or may not change the weights.
        others: called before the workers' method of its name, with the same positional arguments.
    """

    def __init__(
        self,
        executor: Any,
        changed: Callable[[str], None],
        *,
        reports_unknown: bool,
        others: Mapping[str, Callable[..., object]] = MappingProxyType({}),
    ) -> None:
        self._executor = executor
        self._changed = changed
        self._reports_unknown = reports_unknown
        self._others = others
        self._call = executor.collective_rpc
        executor.collective_rpc = self._watched

    def close(self) -> None:
        """Stops the reports. Idempotent."""
        self._changed = lambda _: None  # other wrappers may still call this one
        self._others = {}
        if self._executor.__dict__.get("collective_rpc") == self._watched:
            self._executor.collective_rpc = self._call

    def _watched(self, method: Any, *arguments: Any, **named: Any) -> Any:
        if isinstance(method, str) and method in self._others:
            self._others[method](*_given(arguments, named))
        if method not in _HARMLESS:
            self._note(method, arguments, named)
        return self._call(method, *arguments, **named)

    def _note(self, method: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        if method == "sleep":
            given = named.get("kwargs") or (arguments[2] if len(arguments) > 2 else None) or {}
            positional = _given(arguments, named) or (1,)
            changes = given.get("level", positional[0]) >= _DISCARDS
        else:
            changes = method in _CHANGING or self._reports_unknown
        if changes:
            self._changed(f"{name}() was called")
