"""Which blocks of a request still have to reach the store."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.connector.offload_data import BlockSave, SaveOrder
from kvconnect.keys import BlockKey
from kvconnect.request import LlmRequest

__all__ = ["SavePlan"]


class SavePlan:
    """The blocks that a request holds, and how many of them are in the store or on their way.

    A store finds a block through the one before it. So a block that is not stored ends the plan:
    one below `min_priority` for good, one that was dropped until `reopen`.

    Attributes:
        num_stored: leading full blocks that need no saving; ``None``: not known yet.
    """

    __slots__ = ("_block_ids", "_group", "_min_priority", "_open", "_priorities", "_request",
                 "_stored_tail", "num_stored")  # fmt: skip

    def __init__(self, request: LlmRequest, *, min_priority: int = 0, group: int = 0) -> None:
        self.num_stored: int | None = None
        self._request = request
        self._min_priority = min_priority
        self._group = group
        self._block_ids: list[int] = []
        self._priorities: list[int] = []
        self._open = True
        self._stored_tail: BlockKey | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that the request holds, as far as was reported."""
        return len(self._block_ids)

    def extend(self, block_ids: Sequence[int], priorities: Sequence[int]) -> None:
        """The request got more blocks."""
        self._block_ids += block_ids
        self._priorities += priorities

    def hold(self, block_ids: Sequence[int]) -> None:
        """The request holds exactly `block_ids` now; the never reported do not count."""
        del self._priorities[len(block_ids) :]
        self._block_ids = list(block_ids[: len(self._priorities)])
        if self.num_stored is not None:
            self.num_stored = min(self.num_stored, len(block_ids))

    def forget_blocks(self) -> None:
        """All blocks are new and will be reported."""
        self._block_ids.clear()
        self._priorities.clear()

    def note_stored(self, num_blocks: int, tail: BlockKey | None = None) -> None:
        """The store has so many leading blocks, and one of the key `tail` after them."""
        self.num_stored = num_blocks
        self._stored_tail = tail

    def note_missing(self, block: int) -> None:
        """Block number `block` did not reach the store, or cannot be had from it."""
        if self.num_stored is not None:
            self.num_stored = min(self.num_stored, block)
        self._stored_tail = None

    def close(self) -> None:
        """Nothing is offered until `reopen`: a block was dropped."""
        self._open = False

    def reopen(self) -> None:
        """Offer again what was dropped."""
        self._open = True

    def is_due(self, num_full: int) -> bool:
        """Whether of so many full blocks one may need saving; false at next to no cost."""
        return self._open and (self.num_stored is None or num_full > self.num_stored)

    def order(self, num_full: int, tail_end: int | None = None) -> SaveOrder | None:
        """What to save of the first `num_full` blocks and, with `tail_end`, of the tail after them.

        What is ordered counts as stored from now on.
        """
        first = self.num_stored or 0
        stop = self._first_unwanted(first, min(num_full, self.num_blocks))
        blocks = [self._full_block(number) for number in range(first, stop)]
        self.num_stored = max(first, stop)
        if tail_end is not None and self._wants_tail(num_full):
            blocks.append(self._tail(num_full, tail_end))
        if not blocks or [block.key for block in blocks] == [self._stored_tail]:
            return None
        request = self._request
        parent = request.key_chain.parent(first)
        namespace = request.namespace.encode()
        return SaveOrder(request.request_id, first, parent, tuple(blocks), namespace, self._group)

    def _first_unwanted(self, first: int, stop: int) -> int:
        for number in range(first, stop):
            if self._priorities[number] < self._min_priority:
                return number
        return stop

    def _wants_tail(self, number: int) -> bool:
        return (
            self.num_stored == number < self.num_blocks
            and self._priorities[number] >= self._min_priority
        )

    def _full_block(self, number: int) -> BlockSave:
        size = self._request.key_chain.tokens_per_block
        return self._block(
            number, self._request.block_keys(number, number + 1)[0], (number + 1) * size
        )

    def _tail(self, number: int, end: int) -> BlockSave:
        return self._block(number, self._request.key_chain.tail(end), end)

    def _block(self, number: int, key: BlockKey, end: int) -> BlockSave:
        start = number * self._request.key_chain.tokens_per_block
        tokens = self._request.tokens.view[start:end].copy()
        return BlockSave(key, self._block_ids[number], tokens, self._priorities[number])
