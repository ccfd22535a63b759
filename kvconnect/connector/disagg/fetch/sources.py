"""The ranks of another engine that a rank of this one reads from, with the heads of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvconnect.address import host_and_port
from kvconnect.errors import ConfigurationError
from kvconnect.shards import HeadSlice, StoredHeads


@dataclass(frozen=True, slots=True)
class Source:
    """A rank of another engine.

    Attributes:
        rank: its tensor-parallel rank.
        readers: the number of this engine's ranks that read from it.
        heads: the heads that both ranks hold, by pool group. A group whose heads are read from
            another rank is missing.
    """

    rank: int
    readers: int
    heads: Mapping[int, HeadSlice]


def sources(heads: Sequence[StoredHeads], tp_size: int) -> tuple[Source, ...]:
    """Returns the ranks, in order, of an engine of `tp_size` that a rank with `heads` reads.

    If several ranks hold the same heads, they are read from the first; the others publish nothing.

    Raises:
        ConfigurationError: the heads cannot be divided among `tp_size` ranks.
    """
    by_rank = _by_rank(heads, tp_size)
    ours = heads[0].shard.tp_size
    everyones = [
        _by_rank([replace(one, shard=replace(one.shard, tp_rank=rank)) for one in heads], tp_size)
        for rank in range(ours)
    ]
    return tuple(
        Source(rank, sum(rank in one for one in everyones), by_rank[rank])
        for rank in sorted(by_rank)
    )


def _by_rank(heads: Sequence[StoredHeads], tp_size: int) -> dict[int, dict[int, HeadSlice]]:
    found: dict[int, dict[int, HeadSlice]] = {}
    for group, own in enumerate(heads):
        shares = min(tp_size, own.num_kv_heads)
        if own.num_kv_heads % shares or tp_size % shares:
            raise ConfigurationError(
                f"kv_transfer_params['tp_size']: {tp_size}: {own.num_kv_heads} KV heads cannot be "
                "spread evenly over so many ranks"
            )
        alike = tp_size // shares
        for part in own.slices(shares):
            found.setdefault(part.shard.tp_rank * alike, {})[group] = part
    return found


def address_of_rank(address: str, rank: int) -> str:
    """Returns the address of `rank` of the engine whose first rank listens at `address`.

    Each rank listens at the port after that of the rank before.
    """
    host, port = host_and_port(address)
    if port + rank >= 1 << 16:
        raise ConfigurationError(f"address '{address}': there is no port for rank {rank}")
    return f"[{host}]:{port + rank}" if ":" in host else f"{host}:{port + rank}"
