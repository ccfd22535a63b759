"""A rank's engine without a model: each rank writes KV of its own, and a token tells of all ranks'.

So a block of another rank, or one byte that is wrong on any of them, changes the answer of all.
"""

from __future__ import annotations

import itertools
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import recording
import torch
from bench_engine import LAYERS, LAYOUT, BenchEngine, PlainKv, T, llm_args
from bench_rank import BenchModel, BenchRank, Share
from numpy.typing import NDArray
from recording import Script
from torch import Tensor

from kvconnect.backend import Backend
from kvconnect.config import KvCacheConnectorConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.ranks.distributed import DistributedCommunicator
from kvconnect.connector.runtime.transfers import StepOutcome
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import Shard
from kvconnect.layout import KvCacheLayout

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


class PartModel(BenchModel):
    """A rank's layers of a model that is divided among ranks."""

    def __init__(self, part: Part, pool: Tensor | None = None) -> None:
        super().__init__(part.layout, pool)
        self.part = part

    def kv(self, before: float, token: int, place: int) -> float:
        return self.part.kv(before, token, self.part.layers[place])


class PartRank(BenchRank):
    """Any rank but the leader; the token behind a sequence is what the KV of all ranks says."""

    def __init__(self, args: LlmArgs, communicator: DistributedCommunicator, part: Part) -> None:
        super().__init__(args, communicator, PartModel(part))

    def sample(self, shares: Sequence[Share]) -> None:
        self.communicator.allgather(self.model.digests(shares))

    def drain(self) -> None:
        """Take part until the leader has nothing left to do."""
        while any(self.communicator.allgather(False)):
            self.step()


class RankEngine(BenchEngine):
    """The leader: it computes its own part as every rank does."""

    def __init__(self, args: LlmArgs, communicator: DistributedCommunicator, part: Part) -> None:
        self.communicator = communicator
        self._ids = itertools.count()  # type: ignore[misc]
        kv = PlainKv(layout=part.layout)
        super().__init__(args, kv=kv, model=PartModel(part, kv.pool), communicator=communicator)
        self.key_layouts = (LAYOUT,)  # of the whole model

    def sample(self, shares: Sequence[Share]) -> dict[int, int]:
        seen = self.model.digests(shares)
        ranks: list[Mapping[int, int]] = self.communicator.allgather(seen)
        return {each: next_token([one[each] for one in ranks]) for each in seen}

    def drain(self) -> None:
        deadline = time.monotonic() + 60
        while any(self.communicator.allgather(self._busy())):
            assert time.monotonic() < deadline, "the ranks hang"
            self.step()

    def _busy(self) -> bool:
        return bool(self.queue or self.running or self.loading or self.saving)


class Host:
    """What lives in a rank's process, between the calls of a test."""

    def __init__(self, communicator: DistributedCommunicator) -> None:
        self.communicator = communicator
        self.engine: RankEngine | PartRank | None = None
        self.store: Backend | None = None
        self.script: Script | None = None

    @property
    def bench(self) -> RankEngine | PartRank:
        assert self.engine is not None
        return self.engine

    @property
    def leader(self) -> RankEngine:
        """The engine, on the first rank."""
        assert isinstance(self.engine, RankEngine)
        return self.engine

    @property
    def worker(self) -> Any:
        """The connector's, on this rank."""
        bench = self.bench
        return bench.worker if isinstance(bench, PartRank) else bench.manager._worker

    def close(self) -> None:
        if isinstance(self.engine, RankEngine):
            self.engine.manager.shutdown()
        elif self.engine is not None:
            self.worker.shutdown()
        self.communicator.close()


# ---------------------------------------------------------------------- what a test calls on a rank


def attach(host: Host, ranks: Sequence[Part], config: KvCacheConnectorConfig) -> None:
    """An engine with a connector, or a rank that follows it."""
    part = ranks[host.communicator.rank]
    args = replace(llm_args(config), layouts=(part.layout,), place=part.shard)
    kind = PartRank if host.communicator.rank else RankEngine
    host.engine = kind(args, host.communicator, part)


def attach_disk(host: Host, ranks: Sequence[Part], url: str, settings: dict[str, Any]) -> None:
    settings = {"lookup_timeout_ms": 60_000} | settings
    attach(host, ranks, KvCacheConnectorConfig(url=url, **settings))


def attach_recorder(host: Host, ranks: Sequence[Part], settings: dict[str, Any]) -> None:
    """An engine with the connector that writes down every call."""
    host.script = recording.fresh_script()
    attach(host, ranks, recording.config(**settings))


def detach(host: Host) -> None:
    """The engine's end."""
    if isinstance(host.bench, RankEngine):
        host.bench.idle_step()
        host.bench.manager.shutdown()
    else:
        host.bench.step()
        host.worker.shutdown()
    host.engine = None


def submit(host: Host, prompt: list[int], max_tokens: int) -> int:
    """On the leader: the id of a new request."""
    return host.leader.submit(prompt, max_tokens).request_id


def step(host: Host, number: int = 1) -> list[StepOutcome]:
    """What the steps brought, on the leader; other ranks hear nothing of it."""
    for _ in range(number):
        host.bench.step()
    return host.leader.outcomes[-number:] if host.communicator.rank == 0 else []


def answer(host: Host, prompt: list[int], max_tokens: int) -> tuple[list[int], int] | None:
    """What is generated, and how many tokens of the prompt came from the store, on the leader."""
    if host.communicator.rank:
        return drain(host)
    request = host.leader.submit(prompt, max_tokens)
    drain(host)
    generated = request.tokens.view[len(prompt) :].tolist()
    return generated, host.leader.store_tokens[request.request_id]


def drain(host: Host) -> None:
    """Step until nothing is left to do."""
    host.bench.drain()


def break_store(host: Host) -> None:
    """From now on every load of this rank's store fails."""

    async def failing(*_: Any) -> int:
        raise BackendUnavailable("planted")

    host.worker._store.backend.load = failing


def failed_loads(host: Host) -> int:
    return sum(len(one.failed) for one in host.leader.outcomes)


def diverge(host: Host) -> None:
    """This rank, not the leader, believes to be a step further."""
    assert isinstance(host.bench, PartRank)
    host.bench.driver.number += 1


def blocks_held(host: Host) -> int:
    kv = host.leader.kv
    return len(kv.pool) - kv.get_num_free_blocks()


def work_for_ever(host: Host, prompts: list[list[int]]) -> None:
    """Answer `prompts` and save what is computed, again and again, until something is raised."""
    for prompt in itertools.cycle(prompts):
        answer(host, prompt, 2)
