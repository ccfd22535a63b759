"""A row of a batch: its tokens, their keys, and the blocks that the store still lacks."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.backend import DEFAULT_RETENTION_PRIORITY
from kvconnect.connector.io.lookup import Hit, Query
from kvconnect.connector.io.orders import BlockSave, SaveOrder
from kvconnect.integrations.transformers.rows import PromptRow
from kvconnect.keys import BlockKey, KeyChain, Namespace
from kvconnect.shards import StoredHeads
from kvconnect.tokens import TokenArray, TokenBuffer

__all__ = ["CachedRow"]


class CachedRow:
    """A sequence that grows. Not thread-safe.

    Args:
        prompt: with its padding.
        root: the key before the first block.
        tokens_per_block: of all pool groups.
        namespace: the namespace of `root`.
        num_groups: pool groups.

    Attributes:
        offset: tokens of padding before it.
        tokens: prompt, then what was generated and computed.
        num_done: by pool group, leading blocks that need no saving.
        open: whether it is still saved; a block that is not stored hides those behind it.
    """

    def __init__(
        self,
        prompt: PromptRow,
        root: BlockKey,
        *,
        tokens_per_block: int,
        namespace: Namespace,
        num_groups: int,
    ) -> None:
        self.offset = prompt.offset
        self.tokens = TokenBuffer(prompt.tokens)
        self.num_done = [0] * num_groups
        self.open = True
        self._chain = KeyChain(root, tokens_per_block, self.tokens)
        self._namespace = namespace
        self._tail: BlockKey | None = None

    def query(self, heads: tuple[StoredHeads, ...], *, shared: bool) -> Query:
        """Returns the query for the store."""
        chain = self._chain
        return Query(
            keys=tuple(chain.keys()),
            root=chain.root,
            tokens=self.tokens.view.copy(),
            tokens_per_block=chain.tokens_per_block,
            heads=heads,
            shared=shared,
        )

    def note_hit(self, hit: Hit) -> None:
        """Records the blocks that the store has."""
        stored = [*hit.num_stored, *[0] * len(self.num_done)]
        self.num_done = stored[: len(self.num_done)]
        self._tail = hit.tail

    def note_missing(self, num_tokens: int) -> None:
        """Records that tokens behind the first `num_tokens` could not be loaded."""
        block = num_tokens // self._chain.tokens_per_block
        self.num_done = [min(done, block) for done in self.num_done]
        self._tail = None

    def append(self, tokens: TokenArray) -> None:
        """Appends computed tokens."""
        self.tokens.extend(tokens)

    def truncate(self, num_tokens: int) -> None:
        """Removes all but the first `num_tokens` tokens."""
        self.tokens.truncate(num_tokens)
        self._chain.truncate(num_tokens)
        self.note_missing(num_tokens)

    def num_due(self, num_valid: int) -> int:
        """Returns how many full blocks of the first `num_valid` tokens are due in any group."""
        if not self.open:
            return 0
        return max(0, num_valid // self._chain.tokens_per_block - min(self.num_done))

    def order(self, num_valid: int, first_ids: Sequence[int | None]) -> SaveOrder:
        """Returns the order that saves the blocks that are due.

        Args:
            num_valid: leading tokens whose keys and values are computed.
            first_ids: by pool group, the id of its first block that is due; ``None``: none is.
        """
        stop = num_valid // self._chain.tokens_per_block
        blocks = [
            self._block(number, first_id + number - self.num_done[group], group)
            for group, first_id in enumerate(first_ids)
            if first_id is not None
            for number in range(self.num_done[group], stop)
        ]
        blocks.sort(key=lambda block: block.number)  # parents before children; stable
        return SaveOrder(0, tuple(blocks), self._namespace.tag())

    def saved(self, num_valid: int) -> None:
        """Records that all blocks that were due are being saved."""
        stop = num_valid // self._chain.tokens_per_block
        self.num_done = [max(done, stop) for done in self.num_done]

    def tail_order(self, num_valid: int, first_ids: Sequence[int]) -> SaveOrder | None:
        """Returns the order for the partly filled last block; ``None`` if there is none to save."""
        size = self._chain.tokens_per_block
        number = num_valid // size
        if not self.open or num_valid % size == 0 or min(self.num_done) < number:
            return None
        key = self._chain.tail(num_valid)
        if key == self._tail:
            return None
        self._tail = key
        parent = self._chain.parent(number)
        tokens = self.tokens.view[number * size : num_valid].copy()
        blocks = tuple(
            BlockSave(key, parent, number, block_id, tokens, DEFAULT_RETENTION_PRIORITY, group)
            for group, block_id in enumerate(first_ids)
        )
        return SaveOrder(0, blocks, self._namespace.tag())

    def _block(self, number: int, block_id: int, group: int) -> BlockSave:
        size = self._chain.tokens_per_block
        return BlockSave(
            key=self._chain.keys(number, number + 1)[0],
            parent=self._chain.parent(number),
            number=number,
            block_id=block_id,
            tokens=self.tokens.view[number * size : (number + 1) * size].copy(),
            priority=DEFAULT_RETENTION_PRIORITY,
            group=group,
        )
