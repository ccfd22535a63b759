"""The division of a model among ranks, under the names that TensorRT-LLM's connectors read."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.keys import Shard


@dataclass(frozen=True, slots=True)
class Mapping:
    """The position of one rank among all.

    Attributes:
        world_size: the number of ranks.
        rank: this rank's number: pipeline stage times `tp_size`, plus the tensor-parallel rank.
        tp_size, tp_rank: the tensor-parallel ranks of a stage, and this rank's number among them.
        pp_size, pp_rank: the pipeline stages, and this rank's stage.
        cp_size, cp_rank: 1 and 0, since context parallelism is not supported.
        node_rank: 0, since all ranks are on one machine.
        enable_attention_dp: false: no rank has requests of its own.
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
    """The division of a model, from the view of the rank that holds `shard`."""

    shard: Shard

    def to_mapping(self) -> Mapping:
        """Returns this rank's position."""
        one = self.shard
        return Mapping(
            world_size=one.tp_size * one.pp_size,
            rank=one.pp_rank * one.tp_size + one.tp_rank,
            tp_size=one.tp_size,
            tp_rank=one.tp_rank,
            pp_size=one.pp_size,
            pp_rank=one.pp_rank,
        )
