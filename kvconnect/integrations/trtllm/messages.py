"""The messages of the scheduler to the worker in a step. Picklable."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.connector.io.orders import SaveOrder

__all__ = ["CopyIn", "StepOrders"]


@dataclass(frozen=True, slots=True)
class CopyIn:
    """The fetched and checked blocks of a request, to be copied from host memory to the pool.

    Attributes:
        request_id: the request of the blocks.
        block_ids: where they go, in order; -1: the pool has no block for that one, which a window
            has passed.
    """

    request_id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepOrders:
    """The loads and saves around a forward pass.

    Attributes:
        loads: run before the pass.
        saves: run after the pass.
    """

    loads: tuple[CopyIn, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
