"""How a model is spread over ranks, in the words that connectors for TensorRT-LLM read."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.keys import Shard

__all__ = ["Mapping", "ParallelConfig"]


@dataclass(frozen=True, slots=True)
class Mapping:
    """One rank's place among all.

    Attributes:
        world_size: how many ranks there are.
        rank: this one; pipeline stages are numbered first, tensor-parallel ranks within a stage.
        tp_size, tp_rank: tensor-parallel ranks of a stage, and this one among them.
        pp_size, pp_rank: pipeline stages, and this one's.
        node_rank: the machine; there is one.
        enable_attention_dp: whether ranks have requests of their own; they never have.
    """

    world_size: int = 1
    rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    node_rank: int = 0
    enable_attention_dp: bool = False


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How a model is spread, as seen by the rank that holds `shard`."""

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
