"""The calls of vLLM's workers that replace the model's weights, observed in the engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


class WeightCalls:
    """Reports calls of an engine core to its workers that change the weights.

    Replaces ``collective_rpc`` of one executor, which all such calls use, until `close`. Belongs to
    the core's thread.

    Args:
        executor: vLLM's.
        changed: called with a sentence's beginning, such as "reload_weights() was called", before
            the workers are.
        reports_unknown: also report methods and functions that may or may not change the weights.
    """

    def __init__(
        self, executor: Any, changed: Callable[[str], None], *, reports_unknown: bool
    ) -> None:
        self._executor = executor
        self._changed = changed
        self._reports_unknown = reports_unknown
        self._call = executor.collective_rpc
        executor.collective_rpc = self._watched

    def close(self) -> None:
        """Stops the reports. Idempotent."""
        self._changed = lambda _: None  # other wrappers may still call this one
        if self._executor.__dict__.get("collective_rpc") == self._watched:
            self._executor.collective_rpc = self._call

    def _watched(self, method: Any, *arguments: Any, **named: Any) -> Any:
        if method not in _HARMLESS:
            self._note(method, arguments, named)
        return self._call(method, *arguments, **named)

    def _note(self, method: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        if method == "sleep":
            given = named.get("kwargs") or (arguments[2] if len(arguments) > 2 else None) or {}
            positional = named.get("args") or (arguments[1] if len(arguments) > 1 else ()) or (1,)
            changes = given.get("level", positional[0]) >= _DISCARDS
        else:
            changes = method in _CHANGING or self._reports_unknown
        if changes:
            self._changed(f"{name}() was called")
