"""Saves that wait for the end of their request, where ``save_on`` says so."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.connector.io.orders import SaveOrder
from kvconnect.layout import KvCacheLayout

__all__ = ["HeldSaves"]


class HeldSaves:
    """Orders by request, until it ends or loses its blocks. They grow only while it runs."""

    def __init__(self, layouts: Sequence[KvCacheLayout]) -> None:
        self._windows = [layout.window for layout in layouts]
        self._tokens_per_block = layouts[0].tokens_per_block
        self._orders: dict[int, list[SaveOrder]] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def add(self, order: SaveOrder) -> None:
        """Hold `order`, whose blocks the step that runs fills."""
        self._orders.setdefault(order.request_id, []).append(order)

    def forget(self, request_id: int) -> None:
        """Nothing of this request is to be saved any more."""
        self._orders.pop(request_id, None)

    def take(self, request_id: int, num_tokens: int) -> SaveOrder | None:
        """What was held, as far as it is in the request's blocks with `num_tokens` valid tokens.

        A window has given up what it does not need there: those blocks are others' by now.
        """
        orders = self._orders.pop(request_id, [])
        size = self._tokens_per_block
        first = [blocks_needed(window, num_tokens, size).start for window in self._windows]
        blocks = {
            (block.number, block.group): block  # ordered again after it did not reach the store
            for order in orders
            for block in order.blocks
            if block.number >= first[block.group]
            and block.number * size + (size if block.tokens is None else len(block.tokens))
            <= num_tokens
        }
        if not blocks:
            return None
        ordered = tuple(blocks[key] for key in sorted(blocks))
        return SaveOrder(request_id, ordered, orders[0].namespace)
