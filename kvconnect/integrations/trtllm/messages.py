"""What the scheduler tells the worker in a step. Picklable."""

from __future__ import annotations

from dataclasses import dataclass

from kvconnect.connector.io.orders import SaveOrder

__all__ = ["CopyIn", "StepOrders"]


@dataclass(frozen=True, slots=True)
class CopyIn:
    """Blocks that were fetched for a request, and are checked: host memory to pool.

    Attributes:
        request_id: whose.
        block_ids: where they go, in order; -1: the pool has no block for that one, which a window
            has passed.
    """

    request_id: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepOrders:
    """What is to be done around a forward pass.

    Attributes:
        loads: before it.
        saves: behind it.
    """

    loads: tuple[CopyIn, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
