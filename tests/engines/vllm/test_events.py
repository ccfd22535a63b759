"""vLLM's own structs decode kvconnect's events, and its publisher's protocol is ours."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-engines")

import msgspec
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventAggregator,
    KVEventBatch,
    ZmqEventPublisher,
)

from kvconnect.config import KvCacheConfig
from kvconnect.engine.llm import LLM
from kvconnect.sampling_params import SamplingParams

pytestmark = pytest.mark.engines

T = 16
ONE = SamplingParams(max_tokens=1)


class Subscriber:
    """Follows the protocol of vLLM's example subscriber, with its classes."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str) -> None:
        self.context = zmq.Context()
        self.decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self.sub = self.context.socket(zmq.SUB)
        self.sub.connect(endpoint)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.req = self.context.socket(zmq.DEALER)
        self.req.connect(replay_endpoint)

    def replayed(self, first: int) -> list[tuple[int, KVEventBatch]]:
        self.req.send_multipart((b"", first.to_bytes(8, "big")))
        found = []
        while self.req.poll(10_000):
            _, _, number, payload = self.req.recv_multipart()
            if number == ZmqEventPublisher.END_SEQ:
                return found
            found.append((int.from_bytes(number, "big"), self.decoder.decode(payload)))
        raise AssertionError("no replay")


@pytest.fixture
def subscriber(llama):
    cache = KvCacheConfig(tokens_per_block=T, max_tokens=16 * T, host_cache_size=1 << 20)
    events = {"endpoint": "tcp://127.0.0.1:0", "topic": "kv"}
    with LLM(llama, kv_cache=cache, events=events, dtype="float32", device="cpu") as llm:
        address = llm.events_address
        made = Subscriber(address.endpoint, address.replay_endpoint, address.topic)
        yield llm, made
        made.context.destroy(linger=0)


def test_vllms_own_structs_read_stored_and_removed_blocks(subscriber):
    llm, one = subscriber
    prompts = [[number] * 4 * T for number in range(1, 9)]
    for prompt in prompts:
        llm.generate(prompt, ONE)
    while not one.sub.poll(0):  # the subscription arrives some time
        llm.generate([9] * 4 * T, ONE)
        llm.reset_prefix_cache()
    topic, number, payload = one.sub.recv_multipart()
    assert topic == b"kv"
    assert int.from_bytes(number, "big") > 0
    assert isinstance(one.decoder.decode(payload), KVEventBatch)

    batches = one.replayed(0)
    assert [number for number, _ in batches] == list(range(len(batches)))
    events = [event for _, batch in batches for event in batch.events]
    assert events[0] == AllBlocksCleared()
    stored = [event for event in events if isinstance(event, BlockStored) and event.token_ids]
    [first] = [one for one in stored if one.token_ids[0] == 1]
    assert first.token_ids == prompts[0]
    assert first.block_size == T
    assert len(first.block_hashes) == 4
    assert (first.medium, first.parent_block_hash, first.group_idx) == ("GPU", None, 0)
    assert first.kv_cache_spec_kind == "full_attention"
    removed = {event.medium for event in events if isinstance(event, BlockRemoved)}
    assert removed <= {"GPU", "CPU"}
    assert "GPU" in removed
    KVEventAggregator(1).add_events(stored)  # hashes each
    assert [number for number, _ in one.replayed(1)] == list(range(1, len(batches)))
