"""The saves that wait for the end of their request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.connector.io.orders import BlockSave, SaveOrder
from kvconnect.layout import KvCacheLayout


class HeldSaves:
    """The save orders of each request, held until the request ends or loses its blocks.

    Used with ``save_on="finish"``. Snapshots of states are not held: the request's next one frees
    their block.
    """

    def __init__(self, layouts: Sequence[KvCacheLayout]) -> None:
        self._states = {n for n, layout in enumerate(layouts) if layout.kind == "state"}
        self._windows = [layout.window for layout in layouts]
        self._tokens_per_block = layouts[0].tokens_per_block
        self._orders: dict[int, list[SaveOrder]] = {}

    def __len__(self) -> int:
        return len(self._orders)

    def add(self, order: SaveOrder) -> SaveOrder | None:
        """Holds `order`, whose blocks the running step fills.

        Returns the part that cannot be held; ``None`` if there is none.
        """
        now = self._part(order, of_states=True) if self._states else ()
        kept = self._part(order, of_states=False) if now else order.blocks
        if kept:  # else the request may end without an order that takes it
            held = replace(order, blocks=kept) if now else order
            self._orders.setdefault(order.request_id, []).append(held)
        return replace(order, blocks=now) if now else None

    def _part(self, order: SaveOrder, *, of_states: bool) -> tuple[BlockSave, ...]:
        return tuple(one for one in order.blocks if (one.group in self._states) is of_states)

    def forget(self, request_id: int) -> None:
        """Drops the orders of a request."""
        self._orders.pop(request_id, None)

    def take(
        self, request_id: int, num_tokens: int, rest: SaveOrder | None = None
    ) -> SaveOrder | None:
        """Removes the orders of a request; returns their blocks in its first `num_tokens` tokens.

        Blocks that a window does not need at that position are left out: the window has freed them.

        Args:
            request_id: the request.
            num_tokens: its leading valid tokens.
            rest: blocks that its end orders, in addition; its last snapshot of states may be there.
        """
        orders = self._orders.pop(request_id, [])
        if rest is not None:
            orders.append(rest)
        size = self._tokens_per_block
        first = [
            0 if group in self._states else blocks_needed(window, num_tokens, size).start
            for group, window in enumerate(self._windows)
        ]
        blocks = {
            (block.number, block.group): block  # ordered again because its first save failed
            for order in orders
            for block in order.blocks
            if block.number >= first[block.group]
            and block.number * size + (size if block.tokens is None else len(block.tokens))
            <= num_tokens
        }
        if not blocks:
            return None
        ordered = tuple(blocks[key] for key in sorted(blocks))
        return replace(orders[0], blocks=ordered)
