"""Stands in for LMCache's engine, in the process or as a server of its own."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from enum import Enum
from types import SimpleNamespace

from stand_ins import StandInStore, module

from kvconnect.connector.stream import CpuStream


class EngineType(Enum):
    TRTLLM = "trtllm"


@dataclass
class Metadata:
    """`lmcache.v1.metadata.LMCacheMetadata`: what the adapter says of model and ranks."""

    model_name: str
    world_size: int
    local_world_size: int
    worker_id: int
    local_worker_id: int
    kv_dtype: object
    kv_shape: tuple[int, ...]
    chunk_size: int


class Config:
    """`LMCacheEngineConfig`: the chunk is a block."""

    chunk_size = 16

    @classmethod
    def from_env(cls) -> Config:
        return cls()


class GpuConnector:
    def __init__(self, store: StandInStore) -> None:
        self.store = store
        self.load_stream, self.store_stream = CpuStream(), CpuStream()

    def register_kv_caches(self, kv_cache_tensor) -> None:
        self.store.pool = kv_cache_tensor


class Engine:
    """The stand-in of `LMCacheEngine`."""

    def __init__(self, metadata: Metadata, gpu_connector: GpuConnector) -> None:
        self.metadata, self.gpu_connector = metadata, gpu_connector
        self.ready = False

    def post_init(self) -> None:
        self.ready = True

    def lookup(self, *, tokens: list[int]) -> int:
        assert self.ready
        return self.gpu_connector.store.lookup(tokens)

    def retrieve(self, *, tokens: list[int], block_ids: list[int]) -> None:
        self.gpu_connector.store.load(tokens, block_ids)

    def store(self, *, tokens: list[int], block_ids: list[int]) -> None:
        self.gpu_connector.store.store(tokens, block_ids)


class Builder:
    """`LMCacheEngineBuilder`: one engine per name."""

    engines: dict[str, Engine]

    def __init__(self) -> None:
        self.engines = {}

    def get(self, name: str) -> Engine | None:
        return self.engines.get(name)

    def get_or_create(self, name, config, metadata, gpu_connector, *broadcasts) -> Engine:
        assert config.chunk_size == metadata.chunk_size
        assert len(broadcasts) == 2
        return self.engines.setdefault(name, Engine(metadata, gpu_connector))

    def destroy(self, name: str) -> None:
        del self.engines[name]


# ---------------------------------------------------------------- the server


@dataclass(frozen=True)
class ServerKey:
    """`IPCCacheServerKey`."""

    model_name: str
    world_size: int
    num_kv_readers: int
    worker_id: int | None
    token_ids: tuple[int, ...]
    start: int
    end: int
    request_id: str

    def no_worker_id_version(self) -> ServerKey:
        return replace(self, worker_id=None)


@dataclass
class Done:
    """An answer that is there already."""

    value: object = None
    kept: list[object] = field(default_factory=list)

    def result(self, timeout: float) -> object:
        assert timeout > 0
        return self.value

    def retain_reference(self, event: object) -> None:
        self.kept.append(event)

    def to_device_future(self, *, device, event_backend) -> Done:
        assert device is not None
        assert isinstance(event_backend, EventBackend)
        return self


class EventBackend:
    def check_event_support(self, device) -> None: ...

    def create_event(self, device) -> object:
        return CpuStream().record_event()

    def record_event(self, event, stream) -> None:
        event.record(stream)
        stream.wait_event(event)

    def export_event(self, event, device) -> bytes:
        assert event.query()
        return b"event"


class Client:
    """A server's `RequestClient`, and the server."""

    def __init__(self, store: StandInStore) -> None:
        self.store_of_blocks = store
        self.hits: dict[str, int] = {}
        self.ended: list[str] = []
        self.urls: list[str] = []

    def create(self, url: str, *, context: object) -> Client:
        self.urls.append(url)
        return self

    def get_chunk_size(self) -> Done:
        return Done(self.store_of_blocks.tokens_per_block)

    def lookup(self, key: ServerKey, count: int) -> Done:
        assert key.worker_id is None
        size = self.store_of_blocks.tokens_per_block
        found = self.store_of_blocks.lookup(key.token_ids[: key.end])
        self.hits[key.request_id] = found // size
        return Done()

    def query_prefetch_status(self, request_id: str) -> Done:
        return Done(self.hits[request_id])

    def free_lookup_locks(self, key: ServerKey, count: int) -> Done:
        return Done()

    def end_session(self, request_id: str) -> Done:
        self.ended.append(request_id)
        return Done()

    def register_kv_cache(self, instance, wrapped, model, world_size, engine, hints, rest) -> Done:
        [pool] = wrapped
        assert (world_size, engine, rest) == (1, EngineType.TRTLLM, [])
        assert hints["tokens_per_block"] == self.store_of_blocks.tokens_per_block
        assert hints["num_kv_heads"] * hints["head_dim"] * 16 == pool.tensor.shape[-1]
        self.store_of_blocks.pool = pool.tensor
        return Done()

    def retrieve(self, key: ServerKey, instance, block_ids, event: bytes, skip: int) -> Done:
        assert (event, skip, key.worker_id) == (b"event", 0, 0)
        self.store_of_blocks.load(key.token_ids[: key.end], block_ids[0])
        return Done(value=True)

    def store(self, key: ServerKey, instance, block_ids, event: bytes) -> Done:
        assert (event, key.worker_id) == (b"event", 0)
        self.store_of_blocks.store(key.token_ids[: key.end], block_ids[0])
        return Done(value=True)


def stand_in(package: str, store: StandInStore) -> SimpleNamespace:
    """LMCache without its engine: `package` is the folder ``lmcache`` with the adapters' files."""
    builder, client = Builder(), Client(store)
    module("lmcache", package, torch_dev=SimpleNamespace(Stream=CpuStream))
    module("lmcache.logging", init_logger=logging.getLogger)
    module(
        "lmcache.utils",
        EngineType=EngineType,
        mock_up_broadcast_fn=lambda *_: None,
        mock_up_broadcast_object_fn=lambda *_: None,
    )
    module("lmcache.v1", package + "/v1")
    module("lmcache.v1.config", LMCacheEngineConfig=Config)
    module("lmcache.v1.metadata", LMCacheMetadata=Metadata)
    module("lmcache.v1.cache_engine", LMCacheEngine=Engine, LMCacheEngineBuilder=builder)
    module("lmcache.v1.gpu_connector", CreateGPUConnector=lambda *_: GpuConnector(store))
    module("lmcache.v1.gpu_connector.kv_format")
    module("lmcache.v1.gpu_connector.kv_format.types", LayoutHints=dict)
    module("lmcache.v1.multiprocess")
    module("lmcache.v1.multiprocess.custom_types", IPCCacheServerKey=ServerKey, KVCache=list)
    module("lmcache.v1.multiprocess.transport")
    module("lmcache.v1.multiprocess.transport.base", RequestClient=Client)
    module("lmcache.v1.multiprocess.transport.factory", RequestClientFactory=client)
    module("lmcache.v1.platform")
    module("lmcache.v1.platform.base")
    module(
        "lmcache.v1.platform.base.event_ipc",
        EventIPCBackend=EventBackend,
        get_event_ipc_backend=lambda _: EventBackend(),
    )
    module("lmcache.v1.platform.devices")
    module("lmcache.v1.platform.devices.cuda")
    module(
        "lmcache.v1.platform.devices.cuda.ipc_wrapper",
        RawCudaIPCWrapper=lambda tensor: SimpleNamespace(tensor=tensor),
    )
    module("zmq", Context=SimpleNamespace)
    return SimpleNamespace(builder=builder, client=client)
