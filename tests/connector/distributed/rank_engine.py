"""A rank's engine without a model: each rank writes KV of its own, and a token tells of all ranks'.

So a block of another rank, or one byte that is wrong on any of them, changes the answer of all.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import folder_connector
import numpy as np
import recording
import torch
from bench_engine import DIGEST, LAYERS, LAYOUT, BenchEngine, PlainKv, T, llm_args
from numpy.typing import NDArray
from recording import Script

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.distributed import DistributedCommunicator
from kvconnect.connector.runtime.ledger import StepOutcome
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import Namespace, Shard, root_key, store_key
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
        self.own_exchanges = 0
        self._ids = itertools.count()  # type: ignore[misc]
        args = replace(llm_args(config), layouts=(part.layout,), place=part.shard)
        super().__init__(args, kv=PlainKv(layout=part.layout), communicator=communicator)
        self.kv.set_external_matcher(self)

    def match_external(self, request: LlmRequest, num_device_tokens: int) -> ExternalMatch:
        """The leader's connector answers for all."""
        match = None
        if self.communicator.rank == 0:
            match = self.manager.match_external(request, num_device_tokens)
        self.own_exchanges += 1
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
        self.own_exchanges += 1
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
    settings = {"lookup_timeout_ms": 60_000} | settings
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
    bench, deadline = host.bench, time.monotonic() + 60
    while any(host.communicator.allgather(_busy(bench))):
        assert time.monotonic() < deadline, "the ranks hang"
        bench.step()


def _busy(bench: RankEngine) -> bool:
    return bool(bench.queue or bench.running or bench.loading or bench.saving)


def flush(host: Host) -> None:
    """Until what is staged is written or lost."""
    assert host.bench.manager._worker._queue.flush(60)  # type: ignore[attr-defined]


def plant(host: Host, fault: str, seconds: float = 0.0) -> None:
    """From now on every load of this rank's store ``fails`` or is ``slow``, or saves are slow."""
    store = host.bench.manager._worker._store.backend  # type: ignore[attr-defined]
    load, save = store.load, store.save

    async def failing(*_: Any) -> int:
        raise BackendUnavailable("planted")

    async def late_load(*args: Any) -> int:
        await asyncio.sleep(seconds)
        return int(await load(*args))

    async def late_save(*args: Any) -> int:
        await asyncio.sleep(seconds)
        return int(await save(*args))

    if fault == "fails":
        store.load = failing
    elif fault == "slow":
        store.load = late_load
    else:
        store.save = late_save


def lose_block(host: Host, prompt: list[int], number: int) -> None:
    """This rank's block of a prompt goes from the store."""
    bench = host.bench
    worker = bench.manager._worker
    request = LlmRequest(
        -1,
        np.array(prompt, np.int32),
        chain_root=root_key(DIGEST, (LAYOUT,), Namespace()),
        tokens_per_block=T,
    )
    key = store_key(request.block_keys()[number], 0, bench.part.shard)
    store = worker._store  # type: ignore[attr-defined]
    store.io.submit(store.backend.delete([key])).result(60)


def failed_loads(host: Host) -> int:
    return sum(len(one.failed) for one in host.bench.outcomes)


def diverge(host: Host) -> None:
    """This rank believes to be a step further."""
    host.bench.manager._steps.number += 1


def exchanges_of(host: Host, number: int) -> int:
    """How many exchanges the runtime makes in so many steps, without the engine's own."""
    ranks = host.communicator
    before, own = ranks._number, host.bench.own_exchanges
    step(host, number)
    return ranks._number - before - (host.bench.own_exchanges - own)


def calls(host: Host, *names: str) -> list[tuple[Any, ...]]:
    """What the recording connector of this rank was called with."""
    assert host.script is not None
    return [call for call in host.script.calls if not names or call[0] in names]


def script(host: Host, answers: dict[str, Any]) -> None:
    """What the recording connector answers: ``match``, and what ends from now on."""
    assert host.script is not None
    if "match" in answers:
        host.script.match = lambda *_: answers["match"]
    if "keep" in answers:
        host.script.keep = lambda _: answers["keep"]
    if "finished" in answers:
        host.script.finished = lambda *_: answers["finished"]


def blocks_held(host: Host) -> int:
    kv = host.bench.kv
    return len(kv.pool) - kv.get_num_free_blocks()


def work_for_ever(host: Host, prompts: list[list[int]]) -> None:
    """Answer `prompts` and save what is computed, again and again, until something is raised."""
    for prompt in itertools.cycle(prompts):
        answer(host, prompt, 2)


def attach_folder(host: Host, ranks: Sequence[Part], folder: Path) -> None:
    """An engine with the connector of `folder_connector`."""
    folder_connector.folder = folder
    config = KvCacheConnectorConfig(
        connector_module="folder_connector",
        connector_scheduler_class="FolderScheduler",
        connector_worker_class="FolderWorker",
    )
    host.engine = RankEngine(host.communicator, config, ranks[host.communicator.rank])
