"""The spread of a model over ranks, in the words that connectors for TensorRT-LLM read."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.keys import Shard

__all__ = ["Mapping", "ParallelConfig"]


@dataclass(frozen=True, slots=True)
class Mapping:
    """The place of one rank among all.

    Attributes:
        world_size: how many ranks there are.
        rank: this one; pipeline stages are numbered first, tensor-parallel ranks within a stage.
        tp_size, tp_rank: tensor-parallel ranks of a stage, and this one among them.
        pp_size, pp_rank: pipeline stages, and this one's.
        cp_size, cp_rank: of context parallelism, which is not supported.
        node_rank: the machine; there is one.
        enable_attention_dp: whether ranks have requests of their own; they never have.
    """

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    cp_size: int = 1
    cp_rank: int = 0
    node_rank: int = 0
    enable_attention_dp: bool = False

    @property
    def local_rank(self) -> int:
        """The number of this rank on its machine."""
        return self.rank

    @property
    def tp_group(self) -> list[int]:
        """The ranks of this one's stage, by `tp_rank`."""
        first = self.pp_rank * self.tp_size
        return [*range(first, first + self.tp_size)]

    @property
    def pp_group(self) -> list[int]:
        """The ranks with this one's `tp_rank`, by stage."""
        return [*range(self.tp_rank, self.world_size, self.tp_size)]

    def has_tp(self) -> bool:
        """Returns whether a stage has several ranks."""
        return self.tp_size > 1

    def has_pp(self) -> bool:
        """Returns whether there are several stages."""
        return self.pp_size > 1

    def is_multi_node(self) -> bool:
        """Returns False: all ranks are on one machine."""
        return False

    def is_first_pp_rank(self) -> bool:
        """Returns whether this rank holds the first layers."""
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        """Returns whether this rank holds the last layers."""
        return self.pp_rank == self.pp_size - 1

    def prev_pp_rank(self) -> int:
        """Returns the rank of the stage before; the first one's is the last stage's."""
        return (self.rank - self.tp_size) % self.world_size

    def next_pp_rank(self) -> int:
        """Returns the rank of the next stage; the last one's is the first stage's."""
        return (self.rank + self.tp_size) % self.world_size


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The spread of a model, as seen by the rank that holds `shard`."""

    shard: Shard

    def to_mapping(self) -> Mapping:
        """Returns this rank's place."""
        one = self.shard
        return Mapping(
            world_size=one.tp_size * one.pp_size,
            rank=one.pp_rank * one.tp_size + one.tp_rank,
            tp_size=one.tp_size,
            tp_rank=one.tp_rank,
            pp_size=one.pp_size,
            pp_rank=one.pp_rank,
        )
