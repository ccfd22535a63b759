"""The message of the scheduler to the worker in a step. Picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvconnect.connector.io.orders import SaveOrder

__all__ = ["StepOrders"]


@dataclass(frozen=True, slots=True)
class StepOrders:
    """The loads and saves around a forward pass.

    Attributes:
        loads: run before the pass: by request, where its fetched and checked blocks go in the pool,
            in order; -1: the pool has no block for that one, which a window has passed.
        saves: run after the pass.
    """

    loads: Mapping[int, tuple[int, ...]]
    saves: tuple[SaveOrder, ...]
