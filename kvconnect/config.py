"""The settings of the KV cache, of retention, and of the connector.

Fields and defaults are those of TensorRT-LLM's KV cache system where it has them. `Settings`,
their base class in `kvconnect.settings`, refuses unknown fields and bad values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    field_validator,
    model_validator,
)

from kvconnect.address import host_and_port, is_loopback
from kvconnect.backend import DEFAULT_RETENTION_PRIORITY, Backend
from kvconnect.errors import ConfigurationError, nearest
from kvconnect.redaction import without_passwords
from kvconnect.retention import (
    KvCacheRetentionConfig,
    Priority,
    TokenRangeRetentionConfig,
    warn_of,
)
from kvconnect.settings import Settings
from kvconnect.text import check_text

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEFAULT_LOOKUP_TIMEOUT_MS",
    "DEFAULT_RETENTION_PRIORITY",
    "DEFAULT_SCHEDULING",
    "KvCacheConfig",
    "KvCacheConnectorConfig",
    "KvCacheRetentionConfig",
    "Settings",
    "TokenRangeRetentionConfig",
    "TransferConfig",
    "torch_dtype",
]

DEFAULT_LOOKUP_TIMEOUT_MS = 20.0
"""The default of ``lookup_timeout_ms`` in engines whose other requests wait in the same step."""

DEFAULT_SCHEDULING: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
"""The default of ``scheduling`` in `LLM` and in every command."""

_DTYPES = ("float64", "float32", "float16", "bfloat16")


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype of a configuration's dtype name (never ``auto``)."""
    if name not in _DTYPES:
        raise ConfigurationError(f"dtype: '{name}' is unknown; {nearest(name, _DTYPES)}")
    import torch

    dtype: torch.dtype = getattr(torch, name)
    return dtype


class KvCacheConfig(Settings):
    """The KV cache on the device.

    Attributes:
        enable_block_reuse: keep finished requests' blocks for later requests.
        tokens_per_block: a power of two greater than 1.
        dtype: the dtype of keys and values; ``auto``: the model's; ``fp8``: half of bfloat16's
            memory, and rounded (e4m3, without scales).
        max_tokens: capacity of the cache in tokens, at most.
        free_gpu_memory_fraction: share of the free GPU memory to use (ignored without CUDA).
        max_gpu_total_bytes: capacity of the cache in bytes, at most; 0: no limit in bytes.
        host_cache_size: bytes of pinned host memory for offloaded blocks.
        secondary_offload_min_priority: blocks of a lower priority are dropped, not offloaded.
        enable_partial_reuse: also match the beginning of a block.
        copy_on_partial_reuse: copy a partly matched block, so that the original stays cached.
        max_attention_window: tokens that each layer attends to at most, repeated over the layers.
        state_interval: for a model with recurrent layers, the number of tokens between two
            snapshots of its states; a multiple of `tokens_per_block`.
        pool_ratio: share of memory of each pool; ``None``: by bytes per token.
        event_buffer_max_size: the number of newest events kept for `take_events`; 0: none.
        use_uvm, sink_token_length, transfer_mode: accepted for compatibility, without effect.
    """

    enable_block_reuse: bool = True
    tokens_per_block: Annotated[int, Field(strict=True)] = 32
    dtype: Literal["auto", "float64", "float32", "float16", "bfloat16", "fp8"] = "auto"
    max_tokens: Annotated[int, Field(gt=0)] | None = None
    free_gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.9
    max_gpu_total_bytes: Annotated[int, Field(ge=0)] = 0
    host_cache_size: Annotated[int, Field(ge=0)] = 0
    secondary_offload_min_priority: Priority = DEFAULT_RETENTION_PRIORITY
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    max_attention_window: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] | None = None
    state_interval: PositiveInt = 1024
    pool_ratio: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = None
    event_buffer_max_size: Annotated[int, Field(ge=0)] = 0
    use_uvm: bool = False
    sink_token_length: int | None = None
    transfer_mode: int | None = None

    @field_validator("tokens_per_block")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value < 2 or value & (value - 1):
            raise ValueError("must be a power of two greater than 1 (for example 16, 32 or 64)")
        return value

    @model_validator(mode="after")
    def _without_effect(self) -> Self:
        warn_of(self, "use_uvm", "sink_token_length", "transfer_mode")
        return self


class TransferConfig(Settings):
    """The transfer of blocks between the pools of two engines: prefill to decode, peer to peer.

    Attributes:
        role: ``prefill`` publishes the blocks it computes, ``decode`` fetches blocks, ``both`` does
            either, as each request's ``kv_transfer_params`` say.
        transport: ``tcp``, or ``nixl``, which needs the extra of that name.
        device: the network device of ``nixl``, as UCX names it: ``lo`` keeps it to this machine;
            UCX authenticates no peer, so name one that only trusted machines reach.
        listen: ``host:port`` of the control channel; port 0 takes a free one. With several ranks it
            is the first one's: each other listens one port further on. Other hosts than the
            loopback need a `secret`.
        advertise: ``host:port`` that peers reach `listen` at, if that is another, as behind
            ``0.0.0.0``; travels in ``kv_transfer_params``.
        secret: shared secret, which both sides prove to know before any other message; never shown.
        lease_s: seconds of silence after which a reader loses its claim, and the blocks are
            released. The blocks are released ``save_timeout_s`` after the prompt was computed in
            any case.
        max_lease_total: the most bytes of blocks that are kept for readers; ``None``: no limit.
            Blocks beyond the limit are not published.
        claim_timeout_s: seconds that a decode request waits for a prompt that the prefill side has
            not begun, or has stopped computing. Then the decode side computes the prompt.
        min_bytes_per_s: a pull fails if it has moved nothing for 2 s plus the time that its bytes
            take at this rate.
        verify: ``full``: the reading side compares digests with the other side before the blocks
            count as valid. TCP has checksums of its own; NIXL leaves integrity to the fabric.
        overlap_fetches: compute what the prefill side has not computed or sent yet, if this side
            would have computed it by now. Needs ``overlap_loads``, one pool, and ``verify`` at
            ``none``.
    """

    role: Literal["prefill", "decode", "both"] = "both"
    transport: Literal["tcp", "nixl"] = "tcp"
    device: Annotated[str, Field(min_length=1)] = "lo"
    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    secret: SecretStr | None = None
    lease_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    max_lease_total: Annotated[int, Field(gt=0)] | None = None
    claim_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 10.0
    min_bytes_per_s: Annotated[float, Field(gt=0)] = 16e6
    verify: Literal["none", "full"] = "none"
    overlap_fetches: bool = False

    def __init__(self, /, *args: Any, **values: Any) -> None:
        secret = values.get("secret")
        if not (secret is None or isinstance(secret, (str, SecretStr))):
            # Raised here, where the message does not show the secret.
            raise ConfigurationError(
                f"TransferConfig.secret: a {type(secret).__name__} was given; give text, or None"
            )
        super().__init__(*args, **values)

    @field_validator("listen", "advertise")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        if value is not None:
            host_and_port(value)
        return value

    @model_validator(mode="after")
    def _guarded(self) -> Self:
        host, _ = host_and_port(self.listen)
        if self.secret is not None and len(self.secret.get_secret_value().strip()) < 16:
            raise ValueError("secret: give at least 16 characters, as of `openssl rand -hex 32`")
        if self.secret is None and not is_loopback(host):
            raise ValueError(
                f"listen='{self.listen}' is reached from other machines: that needs a secret; "
                "give one, or listen on 127.0.0.1"
            )
        if self.advertise is None and host in {"0.0.0.0", "::"}:  # noqa: S104  to refuse it
            raise ValueError(
                f"listen='{self.listen}' is no address that peers can connect to; give advertise "
                "as well, 'host:port'"
            )
        return self


class KvCacheConnectorConfig(Settings):
    """The store or connector that KV blocks are loaded from and saved to.

    Give either `url`, a store driven by the built-in pair, or a connector of your own by module and
    class names, as in TensorRT-LLM; or both, if your classes extend the built-in ones.

    Attributes:
        connector_module: module that holds both classes; required together with both class names.
            With `url`, `backend` or `transfer` one class name is enough: the other class is the
            built-in one.
        connector_scheduler_class: name of the `KvCacheConnectorScheduler` subclass; with a store of
            the `OffloadScheduler` subclass.
        connector_worker_class: name of the `KvCacheConnectorWorker` subclass; with a store of the
            `OffloadWorker` subclass.
        url: a store, for example ``disk:///var/cache/kv?capacity=200GiB``.
        backend: instead of `url`, a store of your own; one open engine at a time uses it.
        transfer: prefill to decode between engines, with a store beside it or without.
        codec: how blocks are encoded in the store, as in a store URL's parameter: one of ``fp8``
            and ``int8`` (lossy), one of ``zstd`` and ``lz4``, ``aes-gcm``, joined by ``+``.
        key_file: file with the secret key of ``aes-gcm``. Blocks rounded by another codec or
            encrypted with another key are not found, as those of another model.
        namespace: engines find each other's blocks only under the same name. By default each kind
            of engine has a name of its own, since kernels differ in the last bits of keys and
            values. The usual name for engines of several kinds is ``shared``.
        lookup_timeout_ms: the most that all lookups of one engine step together may delay it.
        load_timeout_s: deadline of a load; after it the tokens are computed. A running load whose
            store freezes waits at most this long. The wait is shorter if the store fails sooner:
            Redis after its ``timeout`` (5 s), a lost server after some 15 s.
        overlap_loads: compute the beginning of a prompt while its end is loaded.
        save_timeout_s: deadline of a save, and of draining at close.
        min_load_tokens: the fewest tokens that are loaded from the store; fewer are computed.
        save_on: save blocks when they are ``full``, or when their request ends (``finish``).
        min_priority: save only blocks of at least this retention priority.
        on_backlog: when the store is slower than the model, ``drop`` blocks or ``wait``.
        staging_bytes: host memory for blocks that are being loaded or saved.
        save_partial_tails: also save the last, partly filled block of a request.
        layerwise: without effect: whole blocks are loaded in the background.
        verify_frames: check every loaded block; off is for measuring only, and is logged.
        max_quarantined_fraction: no new load starts while transfers that timed out hold more than
            this share of the pool.
        max_loading_fraction: the most of the pool that background loads and transfers that timed
            out may hold, as a share. Further loads wait up to ``load_timeout_s`` for others to end;
            then their tokens are computed. A load that is larger than the share runs alone. While
            saves that timed out hold blocks, saves take at most this share, and others are not
            saved.
    """

    connector_module: str | None = None
    connector_scheduler_class: str | None = None
    connector_worker_class: str | None = None
    texts: ClassVar[frozenset[str]] = frozenset({"url"})

    url: str | None = None
    backend: Backend | None = None
    transfer: TransferConfig | None = None
    codec: str | None = None
    key_file: str | None = None
    namespace: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    lookup_timeout_ms: Annotated[float, Field(ge=0)] = DEFAULT_LOOKUP_TIMEOUT_MS
    load_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    overlap_loads: bool = True
    save_timeout_s: Annotated[float, Field(gt=0)] = 30.0
    min_load_tokens: Annotated[int, Field(ge=0)] = 0
    save_on: Literal["full", "finish"] = "full"
    min_priority: Priority = 0
    on_backlog: Literal["drop", "wait"] = "drop"
    staging_bytes: Annotated[int, Field(gt=0)] = 256 << 20
    save_partial_tails: bool = True
    layerwise: bool = True
    verify_frames: bool = True
    max_quarantined_fraction: Annotated[float, Field(gt=0, le=1)] = 0.1
    max_loading_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5

    def __init__(self, /, *args: Any, **values: Any) -> None:
        if isinstance(values.get("transfer"), Mapping):
            # Checked here, where an error does not show the URL's password.
            values["transfer"] = TransferConfig.given("transfer", values["transfer"])
        super().__init__(*args, **values)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, without_passwords(value) if name == "url" and value is not None else value

    @field_validator("namespace")
    @classmethod
    def _encodable(cls, value: str | None) -> str | None:
        if value is not None:
            check_text("namespace", value)
        return value

    @property
    def uses_pair(self) -> bool:
        """Returns whether the built-in pair serves it, perhaps extended by classes of the user."""
        return self.connector_module is None or self._names_store

    @property
    def _names_store(self) -> bool:
        return not (self.url is None and self.backend is None and self.transfer is None)

    @model_validator(mode="after")
    def _one_way_in(self) -> Self:
        if self.url is not None and self.backend is not None:
            raise ValueError("give one of url, backend; given: url, backend")
        names = ("connector_module", "connector_scheduler_class", "connector_worker_class")
        given = [name for name in names if getattr(self, name) is not None]
        if not given:
            return self
        missing = ", ".join(name for name in names if name not in given)
        if self._names_store:
            if names[0] not in given or given == [names[0]]:
                raise ValueError(
                    f"{names[0]} is required together with {names[1]} or {names[2]}, or both; "
                    f"missing: {missing}"
                )
        elif missing:
            raise ValueError(f"{', '.join(names)} are required together; missing: {missing}")
        elif self.codec or self.key_file:
            raise ValueError("codec and key_file are for url or backend, not for your own classes")
        return self
