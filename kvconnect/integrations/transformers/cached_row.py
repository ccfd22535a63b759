"""A row of a batch: its tokens, their keys, and the blocks that the store still lacks."""

from __future__ import annotations

from collections.abc import Sequence

from kvconnect.backend import DEFAULT_RETENTION_PRIORITY
from kvconnect.connector.io.lookup import Hit, Query
from kvconnect.connector.io.orders import SaveOrder
from kvconnect.connector.pair.save_plan import SavePlan
from kvconnect.integrations.transformers.snapshots import last_end
from kvconnect.request import LlmRequest
from kvconnect.shards import StoredHeads
from kvconnect.tokens import TokenArray


class CachedRow:
    """A sequence that grows. Not thread-safe.

    Args:
        request: the prompt, with its keys.
        offset: tokens of padding before it.
        num_groups: pool groups of keys and values.
        num_states: pool groups of states behind these.

    Attributes:
        offset: tokens of padding before it.
        tokens: prompt, then what was generated and computed.
        open: whether it is still saved; a block that is not stored hides those behind it.
    """

    def __init__(
        self,
        request: LlmRequest,
        offset: int,
        *,
        num_groups: int,
        num_states: int = 0,
    ) -> None:
        self.offset = offset
        self.tokens = request.tokens
        self.open = True
        self._chain = request.key_chain
        # For windows, too, all tokens are present; for states those with a snapshot.
        windows = *[None] * num_groups, *[self._chain.tokens_per_block] * num_states
        self._plan = SavePlan(request, windows=windows)

    def query(
        self, heads: tuple[StoredHeads, ...], *, shared: bool, most: int | None = None
    ) -> Query:
        """Returns the query for the store.

        Args:
            heads: the heads of each pool group.
            shared: see `Query`.
            most: use at most so many tokens, a multiple of the block size; ``None``: no limit but
                `snapshots.last_end`, with states.
        """
        chain = self._chain
        size = chain.tokens_per_block
        if most is None and any(one.layout.kind == "state" for one in heads):
            most = last_end(len(self.tokens), size)
        keys = tuple(chain.keys())
        tokens = self.tokens.view.copy()
        return Query(
            keys=keys if most is None else keys[: most // size],
            root=chain.root,
            tokens=tokens if most is None else tokens[: most + 1],
            tokens_per_block=size,
            heads=heads,
            shared=shared,
        )

    def note_hit(self, hit: Hit) -> None:
        """Records the blocks that the store has."""
        self._plan.note_stored(hit.num_stored, hit.tail)

    def note_missing(self, num_tokens: int) -> None:
        """Records that tokens behind the first `num_tokens` could not be loaded."""
        self._plan.note_missing(num_tokens // self._chain.tokens_per_block)

    def append(self, tokens: TokenArray) -> None:
        """Appends computed tokens."""
        self.tokens.extend(tokens)

    def truncate(self, num_tokens: int) -> None:
        """Removes all but the first `num_tokens` tokens."""
        self.tokens.truncate(num_tokens)
        self._chain.truncate(num_tokens)
        self.note_missing(num_tokens)

    def is_due(self, num_full: int) -> bool:
        """Returns whether one of the first `num_full` blocks is to be saved in any group."""
        return self.open and self._plan.is_due(num_full)

    def order(
        self, ids_by_group: Sequence[Sequence[int]], num_full: int, tail_end: int | None = None
    ) -> SaveOrder | None:
        """Returns the blocks to save, which count as stored from now on.

        Args:
            ids_by_group: for each pool group the ids of all blocks of the row; -1: not needed.
            num_full: full blocks whose keys and values are computed.
            tail_end: save the partly filled block behind them, too, which ends with this token.
        """
        self._plan.forget_blocks()
        priorities = [DEFAULT_RETENTION_PRIORITY] * len(ids_by_group[0])
        self._plan.extend(ids_by_group, priorities)
        return self._plan.order(num_full, 0, tail_end)
