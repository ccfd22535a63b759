"""The data that crosses the connector interface: frozen dataclasses, no objects of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.connector.parallel import Mapping, ParallelConfig
from kvconnect.errors import ConfigurationError
from kvconnect.explain.outcome import Outcome
from kvconnect.keys import BlockHash, BlockKey, Shard
from kvconnect.layout import KvCacheLayout
from kvconnect.shards import RankShard, StoredHeads, stored_heads


@dataclass(frozen=True, slots=True)
class LlmArgs:
    """The arguments that a connector is built with.

    Attributes:
        model: directory of the model.
        kv_cache_config, kv_connector_config: the user's settings.
        layouts: the layouts of the pool groups, group 0 first.
        model_digest: 32 bytes; see `kvconnect.digest.model_digest`.
        place: the rank's position among all ranks; `shard` is derived from it.
        backend: a store object of the user; ``None`` if `kv_connector_config` names the store.
        num_kv_heads: the KV heads of each pool group in the whole model; by default each
            tensor-parallel rank has heads of its own, and every rank the latents (MLA).
    """

    model: str
    kv_cache_config: KvCacheConfig
    kv_connector_config: KvCacheConnectorConfig
    layouts: tuple[KvCacheLayout, ...]
    model_digest: bytes
    place: Shard = Shard()
    backend: Backend | None = None
    num_kv_heads: tuple[int, ...] = ()

    @property
    def stored_heads(self) -> tuple[StoredHeads, ...]:
        """The KV heads of each pool group, as a store holds them.

        Raises:
            ConfigurationError: `num_kv_heads` does not fit the layouts.
        """
        return stored_heads(self.layouts, self.place, self.num_kv_heads)

    @property
    def shard(self) -> RankShard:
        """The part of the model on this rank: its heads, and the keys of its share of a block.

        Raises:
            ConfigurationError: `num_kv_heads` does not fit the layouts.
        """
        return RankShard.of(self.place, self.stored_heads)

    @property
    def tensor_parallel_size(self) -> int:
        """The number of ranks that each hold a part of every layer."""
        return self.place.tp_size

    @property
    def pipeline_parallel_size(self) -> int:
        """The number of ranks that hold layers one after the other."""
        return self.place.pp_size

    @property
    def parallel_config(self) -> ParallelConfig:
        """The division of the model among ranks; ``to_mapping()`` returns this rank's position."""
        return ParallelConfig(self.place)

    @property
    def mapping(self) -> Mapping:
        """The position of this rank."""
        return self.parallel_config.to_mapping()

    @property
    def world_size(self) -> int:
        """The number of ranks; each has a worker."""
        return self.mapping.world_size

    @property
    def rank(self) -> int:
        """The number of this rank; 0 is the leader, where the scheduler is."""
        return self.mapping.rank

    @property
    def tokens_per_block(self) -> int:
        """The number of tokens in a block of the KV cache."""
        if self.layouts:
            return self.layouts[0].tokens_per_block
        return self.kv_cache_config.tokens_per_block

    @property
    def has_store(self) -> bool:
        """Returns whether there is a store: the user's own, or one that the configuration names."""
        config = self.kv_connector_config
        return not (config.url is None and config.backend is None and self.backend is None)


@dataclass(frozen=True, slots=True, eq=False)
class KvCachePool:
    """The memory of a pool group: `tensor` is the flat view ``layout.flat_shape(num_blocks)``."""

    layout: KvCacheLayout
    tensor: Tensor


_FOREIGN = frozenset({"groups", "group", "group_of_layer", "as_single_pool_tensor"})


class KvCachePools(tuple[KvCachePool, ...]):
    """A `KvCachePool` for each pool group, in their order.

    TensorRT-LLM's method of the same name gets a ``KvCacheLayout`` instead. Reading that class's
    attributes here raises an error that says so.
    """

    __slots__ = ()

    def __getattr__(self, name: str) -> object:
        if name in _FOREIGN:
            raise ConfigurationError(
                f"register_kv_cache_layout: '{name}' is of TensorRT-LLM's KvCacheLayout; "
                "kvconnect's engine gives a sequence of KvCachePool (layout and tensor of each "
                "group). A connector for both overrides register_kv_caches, the form of one pool"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class RequestData:
    """A request of a step, as `build_connector_meta` gets it.

    Attributes:
        request_id: unique within the engine.
        new_tokens, new_block_ids: tokens and blocks not reported before. The first report has the
            whole prompt and all of its blocks, even if the prompt is computed in chunks.
        computed_position: leading tokens whose KV is valid before this step (``len(tokens) - 1``
            while decoding). Tokens that a synchronous load fills in this step are not counted.
        num_scheduled_tokens: tokens that this step computes; drafts count.
        block_keys: chained keys of the full blocks of the tokens so far; computed when read, which
            is allowed during the step only.
        new_block_ids_by_group: the new block ids of each pool group; -1 where a window holds none.
            `new_block_ids` are those of group 0. Pools of windows get blocks chunk by chunk, so the
            list of such a group may be shorter than that of group 0 and continue later. Of
            recurrent states a request holds the last block at most: the snapshot that it starts
            from, or the one that this step takes at its end.
        cache_salt: the request's salt.
        priorities: retention priority of each new block.
    """

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_keys: Sequence[BlockKey] = field(default_factory=list)
    new_block_ids_by_group: tuple[list[int], ...] = ()
    cache_salt: str | None = None
    priorities: list[int] = field(default_factory=list)

    @property
    def block_hashes(self) -> list[BlockHash]:
        """The `block_keys`, for connectors that name blocks by a 64-bit hash: ``int(hash)``."""
        return [BlockHash(key) for key in self.block_keys]

    @property
    def new_block_ids_by_layer_group(self) -> list[list[int]]:
        """The `new_block_ids_by_group`, under its name in TensorRT-LLM."""
        return [list(ids) for ids in self.new_block_ids_by_group]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The requests of a step.

    Attributes:
        new_requests: once per admission (a preempted request is admitted again).
        cached_requests: every later step of a request, decode steps too.
        loading_requests: requests whose background load starts in this step. They appear in
            `new_requests` when they begin to compute.
    """

    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    loading_requests: list[RequestData] = field(default_factory=list)

    @property
    def prefix_loads(self) -> list[object]:
        """Loads of prefixes that TensorRT-LLM's runtime has reserved; this one reserves none."""
        return []

    @property
    def attention_dp_rank(self) -> None:
        """The owner of the requests in TensorRT-LLM's attention data parallelism; none here."""
        return None


class Direction(Enum):
    """The direction of a transfer."""

    LOAD = "load"
    SAVE = "save"


@dataclass(frozen=True, slots=True)
class TransferFailure:
    """A load or save that failed.

    Attributes:
        request_id: the id of the request.
        direction: load or save.
        num_valid_tokens: leading tokens of the request whose KV is valid nevertheless (loads only).
        reason: the reason, for the log.
        writes_ended: true if the request's blocks get no more writes. If false, the runtime keeps
            the blocks in quarantine until `get_finished` returns the id.
        loss: the outcome of the tokens that the load did not fill.
    """

    request_id: int
    direction: Direction
    num_valid_tokens: int = 0
    reason: str = ""
    writes_ended: bool = True
    loss: Outcome = Outcome.FAILED
