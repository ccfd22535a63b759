"""Stands in for Dynamo's KVBM: leader and worker of its native module, and CUDA's events."""

from __future__ import annotations

import operator
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from stand_ins import StandInStore, module


@dataclass
class Slot:
    """What the leader knows of a request."""

    tokens: list[int]
    block_ids: list[int] = field(default_factory=list)
    computed: int = 0
    matched: int = 0


class Request:
    """`KvbmRequest`."""

    def __init__(self, *, request_id: str, lora_name: None, salt_hash: None) -> None:
        assert isinstance(request_id, str)
        self.request_id = request_id


class Output:
    """The native `SchedulerOutput`; takes what its binding converts: u64 hashes, u32 priorities."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, list[int], list[int], int]] = []
        self.scheduled: dict[str, int] = {}

    def add_new_request(self, *request: Any) -> None:
        self._add(*request)

    def add_cached_request(self, request_id: str, resumed: bool, *rest: Any) -> None:
        assert resumed is False
        self._add(request_id, *rest)

    def _add(self, request_id, tokens, block_ids, position, priorities, hashes) -> None:
        assert isinstance(request_id, str)
        assert all(type(one) is int for one in (*tokens, *block_ids, position, *priorities))
        assert len(priorities) == len(block_ids)
        assert all(0 <= operator.index(one) < 2**64 for one in hashes)
        self.requests.append((request_id, tokens, block_ids, position))

    def add_num_scheduled_tokens(self, scheduled: dict[str, int]) -> None:
        self.scheduled = scheduled


class Fabric:
    """What the native leader and workers share beyond their interfaces."""

    def __init__(self, store: StandInStore) -> None:
        self.store = store
        self.orders: dict[int, tuple[list[int], list[int]]] = {}  # request -> tokens, blocks
        self.finished: list[str] = []
        self.submitted = 0


class Leader:
    """`PyTrtllmKvConnectorLeader`: what the device lacks comes in the background."""

    def __init__(self, fabric: Fabric, rank, drt, block_size, leader, **consolidator) -> None:
        assert (rank, drt) == (0, None)
        assert block_size == fabric.store.tokens_per_block
        assert leader.world_size == 1
        self.fabric, self.size = fabric, block_size
        self.slots: dict[str, Slot] = {}

    def has_slot(self, request_id: str) -> bool:
        return request_id in self.slots

    def create_slot(self, request: Request, tokens: list[int]) -> None:
        assert all(type(token) is int for token in tokens)
        self.slots[request.request_id] = Slot(tokens)

    def get_num_new_matched_tokens(self, request_id: str, num_tokens: int, num_computed: int):
        slot = self.slots[request_id]
        assert num_tokens == len(slot.tokens)
        found = self.fabric.store.lookup(slot.tokens[: (num_tokens - 1) // self.size * self.size])
        slot.computed, slot.matched = num_computed, max(0, found - num_computed)
        return slot.matched, slot.matched > 0

    def update_state_after_alloc(self, request_id: str, block_ids: list[int], position: int):
        slot = self.slots[request_id]
        assert position == slot.computed + slot.matched
        slot.block_ids = list(block_ids)
        if slot.matched:
            first = slot.computed // self.size
            self.fabric.orders[int(request_id)] = (slot.tokens[:position], block_ids)
            assert len(block_ids) > first

    def build_connector_metadata(self, output: Output) -> bytes:
        saves = []
        for request_id, tokens, block_ids, position in output.requests:
            slot = self.slots[request_id]
            if tokens[: len(slot.tokens)] == slot.tokens:  # its first report
                assert block_ids == slot.block_ids
            else:
                slot.tokens += tokens
                slot.block_ids += block_ids
            end = position + output.scheduled[request_id]
            saves.append((slot.tokens[: end // self.size * self.size], list(slot.block_ids)))
        return pickle.dumps(saves)

    def request_finished(self, request_id: str, block_ids: list[int]) -> bool:
        slot = self.slots.pop(request_id)
        assert block_ids == slot.block_ids
        self.fabric.finished.append(request_id)
        return False


class Worker:
    """`PyTrtllmKvConnectorWorker`."""

    def __init__(self, fabric: Fabric, drt, rank: str, **nccl) -> None:
        assert (drt, rank) == (None, "0")
        assert set(nccl.values()) == {None}
        self.fabric = fabric
        self.meta = b""

    def register_kv_caches(self, num_blocks, page_size, device, itemsize, tensor, events) -> None:
        assert tensor.shape[:2] == (num_blocks, len(events))
        assert page_size == self.fabric.store.tokens_per_block
        assert itemsize == tensor.dtype.itemsize
        self.fabric.store.pool = tensor

    def bind_connector_meta(self, meta: bytes) -> None:
        assert isinstance(meta, bytes)
        self.meta = meta

    def start_load_kv(self) -> None: ...

    def save_kv_layer(self, layer: int) -> None:
        raise AssertionError("it has registered a callable for the end of the forward pass")

    def submit_offload_on_event(self, event: int) -> None:
        self.fabric.submitted += 1
        for tokens, block_ids in pickle.loads(self.meta):
            self.fabric.store.store(tokens, block_ids)

    def get_finished(self, saving: list[int], loading: list[int]):
        assert saving == []
        for request_id in loading:
            self.fabric.store.load(*self.fabric.orders.pop(request_id))
        return [], loading


class Event:
    """Stands in for ``torch.cuda.Event`` where torch has no CUDA."""

    cuda_event = 1

    def __init__(self, *, enable_timing: bool = False, interprocess: bool = False) -> None: ...

    def record(self, stream: object = None) -> None: ...


def stand_in(package: str, store: StandInStore) -> Fabric:
    """KVBM without its native module: `package` is the folder ``kvbm`` with its Python files."""
    fabric = Fabric(store)
    native = SimpleNamespace(
        KvbmRequest=Request,
        KvbmBlockList=None,
        BlockState=None,
        BlockStates=None,
        SlotUpdate=None,
        SchedulerOutput=Output,
        PyTrtllmKvConnectorLeader=lambda *args, **more: Leader(fabric, *args, **more),
        PyTrtllmKvConnectorWorker=lambda *args, **more: Worker(fabric, *args, **more),
    )
    module("nixl", _api="a stand-in")
    leader = lambda world_size, drt: SimpleNamespace(world_size=world_size)  # noqa: E731
    module("kvbm", package, KvbmLeader=leader)
    module("kvbm._core", _vllm_integration=native)
    return fabric
