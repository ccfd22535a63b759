"""A subscriber as vLLM's users write it: its structs, declared here, and its protocol."""

from __future__ import annotations

import msgspec
import zmq


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """As vLLM declares it."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """As vLLM declares it."""

    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """As vLLM declares it."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """As vLLM declares it."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class Subscriber:
    """Receives batches, and asks for those it missed."""

    def __init__(self, address, **options):
        self.context = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        for option, value in options.items():
            self.sub.setsockopt(getattr(zmq, option), value)
        self.sub.setsockopt(zmq.SUBSCRIBE, address.topic.encode())
        self.sub.connect(address.endpoint)
        self.req = self.context.socket(zmq.DEALER)
        self.req.connect(address.replay_endpoint)

    def next(self):
        assert self.sub.poll(10_000), "no batch"
        topic, number, payload = self.sub.recv_multipart()
        return topic.decode(), int.from_bytes(number, "big"), DECODER.decode(payload)

    def replay(self, first):
        self.req.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while True:
            assert self.req.poll(10_000), "no replay"
            _, _, number, payload = self.req.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                return found
            found.append((int.from_bytes(number, "big"), DECODER.decode(payload)))

    def close(self):
        self.context.destroy(linger=0)
