"""The settings of TensorRT-LLM that have a meaning in kvconnect's engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum, IntEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field

from kvconnect.config import KvCacheConfig as EngineKvCacheConfig
from kvconnect.config import KvCacheConnectorConfig as EngineKvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs as ConnectorLlmArgs
from kvconnect.settings import Settings

MAX_NUM_TOKENS = 8192
"""The tokens that TensorRT-LLM computes in one step by default."""

TorchLlmArgs = LlmArgs = ExecutorConfig = ConnectorLlmArgs
"""The arguments of connectors."""


class KvCacheTransferMode(IntEnum):
    """The way of blocks to host memory; a debug option, without effect here."""

    DRAM = 0
    GDS = 1
    POSIX_DEBUG_FALLBACK = 2


class CapacitySchedulerPolicy(Enum):
    """The policy for starting requests; see ``scheduling`` of `kvconnect.LLM`."""

    GUARANTEED_NO_EVICT = "guaranteed_no_evict"
    MAX_UTILIZATION = "max_utilization"


class SchedulerConfig(Settings):
    """The settings for starting requests. TensorRT-LLM's other fields do not change answers."""

    capacity_scheduler_policy: CapacitySchedulerPolicy = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    context_chunking_policy: Any = None
    dynamic_batch_config: Any = None
    enable_prefix_aware_scheduling: Any = None


class KvCacheConfig(EngineKvCacheConfig):
    """The KV cache on the device; ``None`` in any field is its default.

    Attributes:
        onboard_blocks, cross_kv_cache_fraction, attention_dp_events_gather_period_ms,
            iteration_stats_interval, mamba_ssm_cache_dtype, use_kv_cache_manager_v2,
            max_util_for_resume: accepted for compatibility; they do not change answers.
    """

    onboard_blocks: Any = None
    cross_kv_cache_fraction: Any = None
    attention_dp_events_gather_period_ms: Any = None
    iteration_stats_interval: Any = None
    mamba_ssm_cache_dtype: Any = None
    use_kv_cache_manager_v2: Any = None
    max_util_for_resume: Any = None

    def __init__(self, /, **values: Any) -> None:
        super().__init__(**{name: value for name, value in values.items() if value is not None})


def _names(module: str, prefix: str, scheduler: str, worker: str) -> Mapping[str, str]:
    return {
        "connector_module": module,
        "connector_scheduler_class": prefix + scheduler,
        "connector_worker_class": prefix + worker,
    }


_LMCACHE = "lmcache.integration.tensorrt_llm"
_KVBM = "kvbm.trtllm_integration.connector"
_PAIR = ("KvConnectorScheduler", "KvConnectorWorker")
_PRESETS = {
    "lmcache": _names(f"{_LMCACHE}.tensorrt_adapter", "LMCache", *_PAIR),
    "lmcache-mp": _names(f"{_LMCACHE}.tensorrt_mp_adapter", "LMCacheMP", *_PAIR),
    "kvbm": _names(_KVBM, "DynamoKVBM", "ConnectorLeader", "ConnectorWorker"),
}


class KvCacheConnectorConfig(EngineKvCacheConnectorConfig):
    """A connector, named by its module and classes, or by TensorRT-LLM's name for it.

    Attributes:
        connector: one of the connectors that TensorRT-LLM knows by name; stands for module and
            classes.
        server_url: where the server of such a connector listens, for those that read it.
        aggressive_prefix_budgeting: False: the engine asks a connector once, at admission, and
            takes back no part of its answer.
    """

    connector: Literal["lmcache", "lmcache-mp", "kvbm"] | None = None
    server_url: Annotated[str | None, Field(repr=False)] = None
    aggressive_prefix_budgeting: Literal[False] = False

    def __init__(self, /, **values: Any) -> None:
        given = values.get("connector")
        preset = _PRESETS.get(given, {}) if isinstance(given, str) else {}
        super().__init__(**{**preset, **values})


_Made = TypeVar("_Made")


def _from_dict(made: Callable[..., _Made]) -> BeforeValidator:
    return BeforeValidator(lambda given: made(**given) if isinstance(given, dict) else given)


class LlmOptions(Settings):
    """The arguments of ``tensorrt_llm.LLM`` beside the model.

    Attributes:
        kv_cache_config, kv_connector_config, scheduler_config: settings, or a dict of them.
        dtype: the dtype of weights and KV.
        max_batch_size: the most requests of one step; ``None``: kvconnect's default.
        max_num_tokens: the most tokens of one step; ``None``: 8192, as in TensorRT-LLM.
        enable_chunked_prefill: divide prompts over several steps. If not, none is divided, and one
            of more than `max_num_tokens` is refused.
        tokenizer: the model's own is used; the model's directory, or ``None``.
        tensor_parallel_size: ranks, in processes that the engine starts; see `kvconnect.LLM`.
        pipeline_parallel_size, context_parallel_size, max_beam_width: 1.
        enable_attention_dp: False: no rank has requests of its own.
        quant_config, lora_config, speculative_config, guided_decoding_backend, revision,
            trust_remote_code: they would change answers, and kvconnect's engine does not have them.
        dropped: how TensorRT-LLM runs a model; accepted without effect.
    """

    kv_cache_config: Annotated[EngineKvCacheConfig | None, _from_dict(KvCacheConfig)] = None
    kv_connector_config: Annotated[
        EngineKvCacheConnectorConfig | None, _from_dict(KvCacheConnectorConfig)
    ] = None
    scheduler_config: Annotated[SchedulerConfig | None, _from_dict(SchedulerConfig)] = None
    dtype: str = "auto"
    max_batch_size: int | None = None
    max_num_tokens: int | None = None
    enable_chunked_prefill: bool | None = None
    tokenizer: str | None = None
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    pipeline_parallel_size: Literal[1] = 1
    context_parallel_size: Literal[1] = 1
    max_beam_width: Literal[1] | None = None
    enable_attention_dp: Literal[False] = False
    quant_config: None = None
    lora_config: None = None
    speculative_config: None = None
    guided_decoding_backend: None = None
    revision: None = None
    tokenizer_revision: None = None
    trust_remote_code: Literal[False] = False
    dropped = frozenset(
        {
            *("backend", "attn_backend", "cuda_graph_config", "disable_overlap_scheduler"),
            *("enable_iter_perf_stats", "fail_fast_on_attention_window_too_large"),
            *("garbage_collection_gen0_threshold", "gpus_per_node", "load_format", "max_input_len"),
            *("max_seq_len", "moe_config", "num_postprocess_workers", "orchestrator_type"),
            *("print_iter_log", "sampler_type", "skip_tokenizer_init", "stream_interval"),
            *("tokenizer_mode", "torch_compile_config", "use_torch_sampler"),
        }
    )
