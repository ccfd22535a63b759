"""The connector class `KvConnect`; vLLM makes one for its scheduler and one for each worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from kvconnect.connector.data import LlmArgs
from kvconnect.errors import ConfigurationError, UsageError
from kvconnect.integrations.core.arguments import SharedArguments, make_arguments
from kvconnect.integrations.core.load_choice import LoadChoice
from kvconnect.integrations.core.metrics_port import tell_metrics
from kvconnect.integrations.core.requests import extra_key_of
from kvconnect.integrations.core.settings import EngineSettings
from kvconnect.integrations.vllm.caches import base_is_apart, cpu_packing, group_planes
from kvconnect.integrations.vllm.callers import executor_of_caller, model_of_caller
from kvconnect.integrations.vllm.configured import lookup_times, settings_of
from kvconnect.integrations.vllm.drafts import draft_variant
from kvconnect.integrations.vllm.exports import KvConnectPromMetrics, KvConnectStats
from kvconnect.integrations.vllm.identity import (
    model_directory,
    model_identity,
    refuse_apart,
    refuse_other_dtype_on_cpu,
    refuse_states,
    refuse_unserved,
    variant_of,
    vllm_version,
)
from kvconnect.integrations.vllm.layouts import (
    CacheGroup,
    cache_groups,
    group_order,
    total_heads,
)
from kvconnect.integrations.vllm.messages import StepMeta, WorkerReport
from kvconnect.integrations.vllm.requests import Roles
from kvconnect.integrations.vllm.scheduler import SchedulerHalf
from kvconnect.integrations.vllm.stats import CounterSteps
from kvconnect.integrations.vllm.weights import WatchedWeights, WeightCalls
from kvconnect.integrations.vllm.worker import WorkerHalf
from kvconnect.keys import Shard

_log = logging.getLogger("kvconnect")

_arguments = SharedArguments()
_steps = CounterSteps()


class KvConnect(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM is not there
    """A connector that keeps the KV cache of vLLM in kvconnect's stores.

    ``kv_connector_extra_config`` holds ``url`` and the other fields of `EngineSettings`. vLLM calls
    the methods of each half as those of its own connectors. None waits for the store, nor raises
    for it.

    Raises:
        ConfigurationError: a setting is wrong, the store cannot be opened, or the model has a cache
            that cannot be served; names the field.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = settings_of(transfer)
        if not transfer.is_kv_producer:
            settings = settings.without_saves()
        refuse_unserved(vllm_config, is_named=settings.own.model_revision is not None)
        refuse_apart(settings.connector.url, vllm_config.parallel_config)
        self._groups = cache_groups(kv_cache_config)
        layouts = [group.layout for group in self._groups]
        refuse_other_dtype_on_cpu(vllm_config, layouts)
        if any(layout.kind == "state" for layout in layouts):
            refuse_states(vllm_config, settings.connector)
        self._packing = cpu_packing(layouts[0])
        own_packing = self._packing if self._packing == "opaque" else None
        variant = variant_of(vllm_config, layouts, packing=own_packing)
        since_ns = lookup_times.take()
        variant |= draft_variant(vllm_config.speculative_config, since_ns=since_ns)
        if settings.is_shared and variant:
            raise ConfigurationError(
                f"kv_connector_extra_config.namespace='shared': {', '.join(sorted(variant))} "
                "changes what this engine stores; use namespace='engine'"
            )
        is_scheduler = role is KVConnectorRole.SCHEDULER
        shard = _shard(vllm_config, is_scheduler=is_scheduler)
        args = _arguments_of(settings, vllm_config, self._groups, shard, since_ns)
        self._args = _arguments.take(transfer.engine_id, args)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        with ExitStack() as undo:
            undo.callback(_arguments.give_back, transfer.engine_id, self._args)
            undo.callback(tell_metrics(settings.engine, settings.own))
            if is_scheduler:
                _warn_of_policy(transfer)
                extra_key = extra_key_of(settings, variant)
                roles = _roles(settings, vllm_config)
                choice = _choice(settings, vllm_config.scheduler_config, self._args)
                order = group_order(
                    self._groups, has_drafts=vllm_config.speculative_config is not None
                )
                self._scheduler = half = SchedulerHalf(self._args, extra_key, roles, choice, order)
                if (executor := executor_of_caller()) is not None:
                    others: dict[str, Callable[..., object]] = {
                        "add_lora": half.adapter_loads,
                        "sleep": half.cache_discarded,
                        "discard": half.cache_discarded,
                    }
                    calls = WeightCalls(
                        executor, half.weights_changed, reports_unknown=False, others=others
                    )
                    undo.callback(calls.close)
            else:
                self._worker = WorkerHalf(self._args)
            self._attached = undo.pop_all()

    @property
    def requires_kv_delivery(self) -> bool:
        """Returns False: a dropped save only causes a later miss."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:  # noqa: ARG003  vLLM's
        """Returns False: the connector does nothing between layers."""
        return False

    def shutdown(self) -> None:
        """Writes staged blocks, up to ``save_timeout_s``, and closes the store. Idempotent."""
        scheduler, worker = self._scheduler, self._worker
        if scheduler is None and worker is None:
            return
        self._scheduler = self._worker = None
        if scheduler is not None:
            scheduler.shutdown()
        if worker is not None:
            worker.shutdown()
        self._attached.close()

    # ------------------------------------------------------------------ the workers' half

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers the pool's memory, by layer; called by vLLM's model runner.

        Raises:
            ConfigurationError: its shape or strides cannot be served, or the runner shows no model.
        """
        model = model_of_caller()
        if model is None:
            raise ConfigurationError(
                f"KvConnect: vLLM {vllm_version()} does not show a connector its model, so that "
                "weights that are replaced while it runs would go unseen; tested versions are in "
                "docs/engines.md"
            )
        num_blocks = self._kv_cache_config.num_blocks
        planes = group_planes(self._groups, kv_caches, num_blocks, packing=self._packing)
        self._own_worker.register(planes, WatchedWeights(model))

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Saves held blocks of preempted requests before they are overwritten."""
        self._own_worker.handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Sets the instructions of this step."""
        super().bind_connector_metadata(connector_metadata)
        self._own_worker.bind(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """Ends the step."""
        super().clear_connector_metadata()
        self._own_worker.clear()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts the step's loads."""
        self._own_worker.start_load()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request is scheduled once its load has ended."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: whole blocks are staged at the end of the step."""

    def wait_for_save(self) -> None:
        """Stages the blocks that the step filled."""
        self._own_worker.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns the saves and loads that have ended."""
        results = self._own_worker.take_results()
        return KVConnectorTransferResults(
            finished_sending=results.saved,
            finished_recving=results.loaded,
            failed_recving=results.failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Returns the ids of blocks that did not load."""
        return self._own_worker.take_invalid_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Returns the report for the scheduler."""
        return self._own_worker.build_report()

    def get_kv_connector_stats(self) -> KvConnectStats | None:
        """Returns the counts of this process since the last call; ``None`` if there are none."""
        moved = _steps.take()
        return KvConnectStats(moved) if moved else None

    # ------------------------------------------------------------------ the scheduler's half

    def on_new_request(self, request: Any) -> None:
        """Starts to look `request` up."""
        self._own_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns the stored tokens beyond `num_computed_tokens`; ``None``: call again."""
        return self._own_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Records the blocks of a request, and how many tokens are loaded into them."""
        self._own_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMeta:
        """Returns the instructions of a step."""
        return self._own_scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Reads the reports of the workers."""
        self._own_scheduler.update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Calls `request_finished_all_groups` for the only group."""
        return self._own_scheduler.request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether blocks are kept until they are saved, and the consumer's parameters."""
        return self._own_scheduler.request_finished(request, block_ids)

    def reset_cache(self) -> bool:
        """Gives changed weights of the model a new name; see `SchedulerHalf.reset_cache`."""
        return self._own_scheduler.reset_cache(device_is_empty=self._device_is_empty())

    def _device_is_empty(self) -> bool:
        """Returns whether vLLM's own cache holds no block, of requests or of prefixes."""
        if self._kv_cache_manager is None:
            return False
        pool = self._kv_cache_manager.block_pool
        return not pool.get_usage() and not len(pool.cached_block_hash_to_block)

    # ------------------------------------------------------------------ what vLLM exports

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvConnectStats:
        """Returns the statistics of another process."""
        return KvConnectStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvConnectPromMetrics:
        """Returns the counters that the API server exports."""
        return KvConnectPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _own_scheduler(self) -> SchedulerHalf:
        if self._scheduler is None:
            raise UsageError("KvConnect: this is a worker's, or was shut down")
        return self._scheduler

    @property
    def _own_worker(self) -> WorkerHalf:
        if self._worker is None:
            raise UsageError("KvConnect: this is the scheduler's, or was shut down")
        return self._worker


def _arguments_of(
    settings: EngineSettings,
    vllm_config: Any,
    groups: tuple[CacheGroup, ...],
    shard: Shard,
    since_ns: int | None,
) -> LlmArgs:
    directory = model_directory(vllm_config)
    digest = model_identity(vllm_config, revision=settings.own.model_revision, since_ns=since_ns)
    layouts = tuple(group.layout for group in groups)
    heads = total_heads(groups, shard, vllm_config.model_config.get_total_num_kv_heads())
    return make_arguments(settings, directory, digest, layouts, shard=shard, num_kv_heads=heads)


def _shard(vllm_config: Any, *, is_scheduler: bool) -> Shard:
    parallel = vllm_config.parallel_config
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if is_scheduler or size * stages == 1:
        return Shard(0, size, 0, stages)
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    return Shard(get_tensor_model_parallel_rank(), size, get_pp_group().rank_in_group, stages)


def _roles(settings: EngineSettings, vllm_config: Any) -> Roles:
    transfer = vllm_config.kv_transfer_config
    return Roles(
        saves=transfer.is_kv_producer,
        loads=transfer.is_kv_consumer,
        tells=transfer.is_kv_producer and not transfer.is_kv_consumer,
        base_is_apart=base_is_apart(vllm_config),
        features_are_own=getattr(vllm_config, "ec_transfer_config", None) is None,
        producer_timeout_s=settings.own.producer_timeout_s,
    )


def _choice(settings: EngineSettings, scheduler_config: Any, args: LlmArgs) -> LoadChoice:
    return LoadChoice(
        tokens_per_block=args.tokens_per_block,
        max_tokens=scheduler_config.max_num_batched_tokens,
        # vLLM schedules the next step meanwhile.
        num_ahead=1 if getattr(scheduler_config, "async_scheduling", False) else 0,
        decides=settings.own.load_decisions,
    )


def _warn_of_policy(transfer: Any) -> None:
    if transfer.kv_load_failure_policy == "fail":
        _log.warning(
            "kv_load_failure_policy='fail': a request whose load fails ends with an error; set "
            "'recompute' in kv_transfer_config, and its tokens are computed (beside others in a "
            "MultiConnector: in that one's configuration, which is the one that vLLM obeys)"
        )


def _register() -> None:
    """Registers the class by name, since vLLM's statistics look it up so."""
    name = KvConnect.__name__
    try:
        KVConnectorFactory.register_connector(name, "kvconnect.integrations.vllm", name)
    except ValueError:  # this module was imported before, by another name
        _log.debug("%s is registered already", name)


_register()
