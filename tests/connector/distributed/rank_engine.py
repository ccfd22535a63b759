"""A rank's engine without a model: each rank writes KV of its own, and a token tells of all ranks'.

So a block of another rank, or one byte that is wrong on any of them, changes the answer of all.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
import recording
import torch
from bench_engine import LAYERS, BenchEngine, PlainKv, T, llm_args
from numpy.typing import NDArray
from recording import Script

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.distributed import DistributedCommunicator
from kvconnect.connector.runtime.ledger import StepOutcome
from kvconnect.keys import Shard
from kvconnect.layout import KvCacheLayout
from kvconnect.request import ExternalMatch, LlmRequest, ScheduledBatch

PROMPT = list(range(1, 4 * T + 2))  # four blocks and a token


@dataclass(frozen=True)
class Part:
    """What a rank holds of the model: `layers` by their number in the whole model."""

    shard: Shard
    layers: range

    @property
    def layout(self) -> KvCacheLayout:
        return KvCacheLayout(len(self.layers), 1, 1, 1, T, torch.float64)

    def kv(self, before: float, token: int, layer: int) -> float:
        """Of one position, in one of the model's layers, given that of the position before it."""
        return float(zlib.crc32(f"{before!r} {token} {layer} {self.shard.tp_rank}".encode()))


def parts(size: int, *, stages: int = 1) -> list[Part]:
    """`size` ranks, of `stages` pipeline stages with the model's layers in turn."""
    tp_size = size // stages
    cuts = [LAYERS * stage // stages for stage in range(stages + 1)]
    return [
        Part(Shard(rank, tp_size, stage, stages), range(cuts[stage], cuts[stage + 1]))
        for stage in range(stages)
        for rank in range(tp_size)
    ]


def expected(prompt: Sequence[int], max_tokens: int, ranks: Sequence[Part]) -> list[int]:
    """What `ranks` answer together."""
    tokens = [*prompt]
    for _ in range(max_tokens):
        digests = []
        for part in ranks:
            kv = np.zeros((len(part.layers), 2, len(tokens)))
            for place, layer in enumerate(part.layers):
                before = 0.0
                for position, token in enumerate(tokens):
                    kv[place, :, position] = before = part.kv(before, token, layer)
            digests.append(digest(kv))
        tokens.append(next_token(digests))
    return tokens[len(prompt) :]


def digest(kv: NDArray[np.float64]) -> int:
    """Of a rank's KV of one sequence: ``[layers, 2, tokens]``."""
    return zlib.crc32(np.ascontiguousarray(kv).tobytes())


def next_token(digests: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"<{len(digests)}I", *digests)) % 97


class RankEngine(BenchEngine):
    """One rank. Everything but `Part` is the same on all of them, so that they stay in step."""

    def __init__(
        self, communicator: DistributedCommunicator, config: KvCacheConnectorConfig, part: Part
    ) -> None:
        self.part, self.communicator = part, communicator
        self._ids = count()  # type: ignore[misc]
        args = replace(llm_args(config), layouts=(part.layout,), shard=part.shard)
        super().__init__(args, kv=PlainKv(layout=part.layout), communicator=communicator)
        self.kv.set_external_matcher(self)

    def match_external(self, request: LlmRequest, num_device_tokens: int) -> ExternalMatch:
        """The leader's connector answers for all."""
        match = None
        if self.communicator.rank == 0:
            match = self.manager.match_external(request, num_device_tokens)
        answer = self.communicator.broadcast(match)
        assert answer is not None
        return answer

    def blocks_allocated(
        self, request: LlmRequest, block_ids: list[int], by_group: Sequence[list[int]] = ()
    ) -> None:
        self.manager.blocks_allocated(request, block_ids)

    def forward(self, batch: ScheduledBatch) -> dict[int, int]:
        if not batch.requests:
            return {}
        for place, layer in enumerate(self.part.layers):
            self.manager.wait_for_layer_load(place)
            for request in batch.requests:
                self._compute(request, place, layer)
            self.manager.save_kv_layer(place)
        self.manager.end_forward()
        seen = {one.request_id: self._digest(one) for one in batch.requests if self._ends(one)}
        ranks: list[Mapping[int, int]] = self.communicator.allgather(seen)
        return {each: next_token([one[each] for one in ranks]) for each in seen}

    def _ends(self, request: LlmRequest) -> bool:
        return self._first(request) + request.num_scheduled_tokens >= request.num_tokens

    def _compute(self, request: LlmRequest, place: int, layer: int) -> None:
        first, ids = self._first(request), self.kv.blocks[request.request_id]
        pool, tokens = self.kv.pool[:, place], request.tokens.view
        before = 0.0 if first == 0 else float(pool[ids[(first - 1) // T], 0, (first - 1) % T])
        for position in range(first, min(first + request.num_scheduled_tokens, len(tokens))):
            before = self.part.kv(before, int(tokens[position]), layer)
            pool[ids[position // T], :, position % T] = before

    def _digest(self, request: LlmRequest) -> int:
        pool = self.kv.pool[self.kv.blocks[request.request_id]]
        seen = pool.permute(1, 2, 0, 3).reshape(len(self.part.layers), 2, -1)
        return digest(seen[:, :, : request.num_tokens].numpy())


class Host:
    """What lives in a rank's process, between the calls of a test."""

    def __init__(self, communicator: DistributedCommunicator) -> None:
        self.communicator = communicator
        self.engine: RankEngine | None = None
        self.store: Backend | None = None
        self.script: Script | None = None

    @property
    def bench(self) -> RankEngine:
        assert self.engine is not None
        return self.engine

    def close(self) -> None:
        if self.engine is not None:
            self.engine.manager.shutdown()
        self.communicator.close()


# ---------------------------------------------------------------------- what a test calls on a rank


def attach(host: Host, ranks: Sequence[Part], **settings: Any) -> None:
    """An engine with the built-in pair and its store."""
    settings = {"lookup_timeout_ms": 5000.0} | settings
    part = ranks[host.communicator.rank]
    host.engine = RankEngine(host.communicator, KvCacheConnectorConfig(**settings), part)


def attach_disk(host: Host, ranks: Sequence[Part], url: str, settings: dict[str, Any]) -> None:
    attach(host, ranks, url=url, **settings)


def attach_recorder(host: Host, ranks: Sequence[Part], settings: dict[str, Any]) -> None:
    """An engine with the connector that writes down every call."""
    host.script = recording.fresh_script()
    part = ranks[host.communicator.rank]
    host.engine = RankEngine(host.communicator, recording.config(**settings), part)


def detach(host: Host) -> None:
    """The engine's end."""
    host.bench.manager.end_step()
    host.bench.manager.shutdown()
    host.engine = None


def submit(host: Host, prompt: list[int], max_tokens: int) -> int:
    return host.bench.submit(prompt, max_tokens).request_id


def step(host: Host, number: int = 1) -> list[StepOutcome]:
    for _ in range(number):
        host.bench.step()
    return host.bench.outcomes[-number:]


def answer(host: Host, prompt: list[int], max_tokens: int) -> tuple[list[int], int]:
    """What is generated, and how many tokens of the prompt came from the store."""
    request = host.bench.submit(prompt, max_tokens)
    drain(host)
    generated = request.tokens.view[len(prompt) :].tolist()
    return generated, host.bench.store_tokens[request.request_id]


def drain(host: Host) -> None:
    """Step until nothing is left to do. All ranks agree on that, so they end in the same step."""
    bench, deadline = host.bench, time.monotonic() + 15
    while any(host.communicator.allgather(_busy(bench))):
        assert time.monotonic() < deadline, "the ranks hang"
        bench.step()


def _busy(bench: RankEngine) -> bool:
    return bool(bench.queue or bench.running or bench.loading or bench.saving)


def flush(host: Host) -> None:
    """Until what is staged is written or lost."""
    assert host.bench.manager._worker._queue.flush(10)  # type: ignore[attr-defined]
