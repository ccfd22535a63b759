"""The division of a model's KV heads in a store, which every tensor parallelism can load.

A block is stored once for every share of the KV heads, and its store key says which share of how
many. With tensor parallelism up to the number of KV heads each rank has a share of its own. Several
ranks hold the same heads beyond that, for a latent (MLA), and in models whose attention is not
divided; these heads are stored once. So are recurrent states that every rank has whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey, Shard, store_key
from kvconnect.layout import KvCacheLayout


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """The heads that a rank and a stored block have in common.

    Attributes:
        shard: the shard of the stored block, for `store_key`.
        source: heads of the stored block.
        target: the same heads in the rank's block.
    """

    shard: Shard
    source: slice
    target: slice


@dataclass(frozen=True, slots=True)
class StoredHeads:
    """The division of one pool group's KV heads in a store, and the part that a rank has.

    Attributes:
        layout: the layout of the rank's own blocks.
        shard: the rank.
        num_kv_heads: of each layer of the whole model. Of recurrent states it is 1 if every rank
            has all of them, which are stored once. Otherwise it is the number of ranks: each stores
            its part, as it has it, for the same number of ranks.
    """

    layout: KvCacheLayout
    shard: Shard
    num_kv_heads: int

    def __post_init__(self) -> None:
        if self.layout.kind == "state" and self.num_kv_heads not in {1, self.shard.tp_size}:
            raise ConfigurationError(
                f"num_kv_heads: {self.num_kv_heads} of recurrent states; with tensor_parallel_size="
                f"{self.shard.tp_size} they are whole on every rank (1), or have one part for each "
                "rank"
            )
        heads, tp, size = self.num_kv_heads, self.shard.tp_size, self.size
        if heads < 1 or heads % size or tp % size:
            raise ConfigurationError(
                f"num_kv_heads: {heads} can be neither split nor repeated evenly over "
                f"tensor_parallel_size={tp}"
            )
        if self.layout.num_kv_heads != heads // size:
            raise ConfigurationError(
                f"num_kv_heads: {self.layout.num_kv_heads} in a rank's layout; "
                f"{heads // size} is a share of {heads} with tensor_parallel_size={tp}"
            )

    # ------------------------------------------------------------------ the rank's own share

    @property
    def size(self) -> int:
        """The number of shares that such ranks divide the heads into; 1: each rank has all."""
        if self.layout.num_kv_heads == self.num_kv_heads:
            return 1
        return min(self.shard.tp_size, self.num_kv_heads)

    @property
    def heads(self) -> range:
        """The rank's KV heads, by their numbers in a layer of the whole model."""
        own = self.layout.num_kv_heads
        return range(self._rank * own, (self._rank + 1) * own)

    @property
    def own(self) -> Shard:
        """The shard in the `store_key` of the rank's blocks, equal on ranks with the same heads."""
        return self._shard(self._rank, self.size)

    @property
    def is_first(self) -> bool:
        """Returns whether no earlier rank holds the same heads, so that this one saves them."""
        return self.shard.tp_rank % (self.shard.tp_size // self.size) == 0

    # ------------------------------------------------------------------ all sizes

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of shares in which a block is searched: the rank's own, then the nearest.

        They are those that tensor parallelism by powers of two makes; at most 8.
        """
        heads, own = self.num_kv_heads, self.size
        if self.layout.kind == "state":
            return (own,)  # a mixer divides several tensors, each in its own way
        powers = (1 << exponent for exponent in range(7))
        others = {size for size in (*powers, heads) if heads % size == 0 and size <= _MOST_SHARES}
        nearest = sorted(others - {own}, key=lambda size: (max(size, own) // min(size, own), size))
        return (own, *nearest)

    def shards(self, size: int) -> tuple[Shard, ...]:
        """Returns the shards that together are all heads, in `size` shares, on all pipeline stages.

        A block counts as stored in `size` shares if it is there under the `store_key` of each. The
        leader looks up all of them where the ranks share a store.
        """
        stages = range(self.shard.pp_size)
        return tuple(
            Shard(rank, size, stage, len(stages)) for stage in stages for rank in range(size)
        )

    def slices(self, size: int) -> tuple[HeadSlice, ...]:
        """Returns the parts of blocks, stored in `size` shares, that hold the rank's heads.

        They are in order of the heads. ``slices(self.size)`` is one: all of the rank's own block.
        """
        own, share = self.layout.num_kv_heads, self.num_kv_heads // size
        low, high = self._rank * own, (self._rank + 1) * own
        found = []
        for rank in range(low // share, -(-high // share)):
            start, stop = max(low, rank * share), min(high, (rank + 1) * share)
            source = slice(start - rank * share, stop - rank * share)
            found.append(HeadSlice(self._shard(rank, size), source, slice(start - low, stop - low)))
        return tuple(found)

    def layout_of(self, size: int) -> KvCacheLayout:
        """Returns the layout of a block that is stored in `size` shares."""
        return replace(self.layout, num_kv_heads=self.num_kv_heads // size)

    def store_keys(self, key: BlockKey, group: int, size: int) -> tuple[BlockKey, ...]:
        """Returns the store keys of the block of `group` with chained `key`, in `size` shares.

        All of them have to be present: see `shards`.
        """
        return tuple(store_key(key, group, shard) for shard in self.shards(size))

    # ------------------------------------------------------------------ inside

    @property
    def _rank(self) -> int:
        return self.shard.tp_rank * self.size // self.shard.tp_size

    def _shard(self, rank: int, size: int) -> Shard:
        return Shard(rank, size, self.shard.pp_rank, self.shard.pp_size)


_MOST_SHARES = 64


@dataclass(frozen=True, slots=True)
class RankShard(Shard):
    """A rank's part of the model, and the keys under which a store holds it.

    A block key is the same on every rank; the bytes under it are not. So ranks that share a store
    save their shares under `store_key`, and a block counts as stored if all of `store_keys` are
    present.

    Attributes:
        groups: how a store holds the KV heads of each pool group.
    """

    groups: tuple[StoredHeads, ...] = ()

    @classmethod
    def of(cls, rank: Shard, groups: tuple[StoredHeads, ...]) -> RankShard:
        """Returns the part of `rank`."""
        return cls(rank.tp_rank, rank.tp_size, rank.pp_rank, rank.pp_size, groups)

    def store_key(self, block_key: BlockKey, group: int = 0) -> BlockKey:
        """Returns the key of this rank's share of a block; ranks with the same heads share it."""
        return store_key(block_key, group, self.groups[group].own)

    def store_keys(self, block_key: BlockKey, group: int = 0) -> tuple[BlockKey, ...]:
        """Returns the keys of all ranks' shares of a block: the whole of it."""
        heads = self.groups[group]
        return heads.store_keys(block_key, group, heads.size)

    def heads(self, group: int = 0) -> range:
        """Returns the KV heads that this rank holds, of those of a layer of the whole model."""
        return self.groups[group].heads

    def is_first(self, group: int = 0) -> bool:
        """Returns whether no rank before this one holds the same heads: one of them saves."""
        return self.groups[group].is_first


def stored_heads(
    layouts: Sequence[KvCacheLayout], shard: Shard, num_kv_heads: Sequence[int] = ()
) -> tuple[StoredHeads, ...]:
    """Returns the stored heads of each pool group of a rank.

    Args:
        layouts: the layouts of the rank's pools.
        shard: the rank.
        num_kv_heads: KV heads of each group in the whole model; by default each rank has heads of
            its own, and every rank has the latents.

    Raises:
        ConfigurationError: the arguments contradict each other.
    """
    if num_kv_heads and len(num_kv_heads) != len(layouts):
        raise ConfigurationError(
            f"num_kv_heads: {tuple(num_kv_heads)} must be one number for each of the "
            f"{len(layouts)} pool groups"
        )
    totals = num_kv_heads or [_total(layout, shard) for layout in layouts]
    return tuple(
        StoredHeads(layout, shard, total) for layout, total in zip(layouts, totals, strict=True)
    )


def whole_layouts(
    layouts: Sequence[KvCacheLayout], shard: Shard, num_kv_heads: Sequence[int] = ()
) -> tuple[KvCacheLayout, ...]:
    """Returns `layouts` as on one rank with all heads, as `root_key` and `model_tag` take them.

    Args and errors are those of `stored_heads`.
    """
    return tuple(one.layout_of(1) for one in stored_heads(layouts, shard, num_kv_heads))


def dividing_rank(heads: Sequence[StoredHeads]) -> tuple[int, int]:
    """Returns this rank's number among the ranks that divide heads, and how many they are.

    If every rank has all heads it returns ``(0, 1)``.
    """
    if all(one.size == 1 for one in heads):
        return 0, 1
    return heads[0].shard.tp_rank, heads[0].shard.tp_size


def _total(layout: KvCacheLayout, shard: Shard) -> int:
    if layout.kind == "state" and shard.tp_size > 1:
        raise ConfigurationError(
            f"num_kv_heads: missing; with tensor_parallel_size={shard.tp_size} it says whether "
            "recurrent states are whole on every rank (1), or have one part for each rank"
        )
    return layout.num_kv_heads * shard.tp_size if layout.kind == "kv" else 1
