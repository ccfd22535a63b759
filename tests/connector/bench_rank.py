"""The ranks beside a `BenchEngine`: they compute what it tells them, and know no request."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvconnect.connector.data import KvCachePool, KvCachePools, LlmArgs
from kvconnect.connector.ranks.communicator import Communicator
from kvconnect.connector.runtime.loading import build_worker, connector_classes
from kvconnect.connector.runtime.rank import RankDriver
from kvconnect.layout import KvCacheLayout

NUM_BLOCKS = 64


@dataclass(frozen=True)
class Share:
    """The tokens ``first..end`` of a request, which a step computes in `blocks` of each group."""

    request_id: int
    first: int
    end: int
    tokens: list[int]
    blocks: list[list[int]]

    @property
    def is_whole(self) -> bool:
        """Whether a token is sampled behind it."""
        return self.end >= len(self.tokens)


@dataclass(frozen=True)
class Work:
    """A step's shares; other content comes into the blocks `overwritten` before it begins."""

    shares: list[Share]
    overwritten: list[int]


class BenchModel:
    """A rank's layers, and their KV in the blocks of `pool`.

    The KV of a position is a checksum over its token, the layer and the KV of the position before
    it, as read from the pool; the next token is one over all KV of the sequence.
    """

    def __init__(self, layout: KvCacheLayout, pool: Tensor | None = None) -> None:
        self.layout = layout
        self.num_layers = layout.num_layers
        shape = layout.flat_shape(NUM_BLOCKS)
        self.pool = torch.zeros(shape, dtype=torch.float64) if pool is None else pool

    def kv(self, before: float, token: int, place: int) -> float:
        """Of one position in layer `place`, given that of the position before it."""
        return float(zlib.crc32(f"{before!r} {token} {place}".encode()))

    def compute(self, share: Share, place: int) -> None:
        """Writes the KV of `share` in layer `place`."""
        size, pool, [ids] = self.layout.tokens_per_block, self.pool[:, place], share.blocks
        last = share.first - 1
        before = float(pool[ids[last // size], 0, last % size]) if share.first else 0.0
        for at in range(share.first, min(share.end, len(share.tokens))):
            before = self.kv(before, share.tokens[at], place)
            pool[ids[at // size], :, at % size] = before

    def digests(self, shares: Sequence[Share]) -> dict[int, int]:
        """Of all KV of each request behind which a token is sampled."""
        return {one.request_id: self._digest(one) for one in shares if one.is_whole}

    def _digest(self, share: Share) -> int:
        seen = self.pool[share.blocks[0]].permute(1, 2, 0, 3)
        seen = seen.reshape(self.num_layers, 2, -1)[:, :, : len(share.tokens)]
        return zlib.crc32(seen.contiguous().numpy().tobytes())


class BenchRank:
    """One rank but the leader; `step` takes part in one step."""

    def __init__(
        self, args: LlmArgs, communicator: Communicator, model: BenchModel | None = None
    ) -> None:
        [layout] = args.layouts
        self.communicator = communicator
        self.model = model or BenchModel(layout)
        self.pool = self.model.pool
        self.worker = build_worker(args, connector_classes(args)[1])
        pools = KvCachePools([KvCachePool(layout, self.pool)])
        self.driver = RankDriver(self.worker, pools, communicator, wakeup=lambda: None)
        self.sampled: defaultdict[int, dict[int, int]] = defaultdict(dict)

    def step(self) -> None:
        step = self.communicator.broadcast(None)
        assert step is not None
        self.driver.accept(step)
        work = step.work or Work([], [])
        self.pool[work.overwritten] = 9.0
        self.driver.start()
        if work.shares:
            for place in range(self.model.num_layers):
                self.driver.wait_for_layer_load(place)
                for share in work.shares:
                    self.model.compute(share, place)
                self.driver.save_kv_layer(place)
            self.driver.end_forward()
            self.sample(work.shares)
        self.driver.end()

    def sample(self, shares: Sequence[Share]) -> None:
        """Notes the tokens that this rank's KV alone says, by request and position."""
        for one, digest in self.model.digests(shares).items():
            [share] = [share for share in shares if share.request_id == one]
            self.sampled[one][len(share.tokens)] = digest % 97
