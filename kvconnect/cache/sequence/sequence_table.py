"""The live sequences of a block manager."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np
import numpy.typing as npt

from kvconnect.cache.pool.block_pool import BlockPool
from kvconnect.cache.pool.held_blocks import NOT_HELD, HeldBlocks, as_id_array, no_ids
from kvconnect.cache.pool.matching import Matcher, first_in_window
from kvconnect.cache.pool.slabs import Slabs
from kvconnect.cache.sequence.publication import Publication
from kvconnect.cache.sequence.sequence import PinHandle, Sequence, check_position
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError, UnknownRequest
from kvconnect.keys import BlockKey, KeyChain, root_key
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import TokenBuffer, Tokens, as_token_array


class SequenceTable:
    """The live sequences by request id, with the methods that change and end them.

    All methods raise `UnknownRequest` if no live sequence has the given id.
    """

    def __init__(
        self,
        tree: RadixTree,
        pools: Items[BlockPool],
        slabs: Slabs,
        *,
        matcher: Matcher,
        layouts: Items[KvCacheLayout],
        config: KvCacheConfig,
    ) -> None:
        self._tree = tree
        self._pools = pools
        self._slabs = slabs
        self._matcher = matcher
        self._layouts = layouts
        self._tokens_per_block = tree.tokens_per_block
        self._reuse = config.enable_block_reuse
        self._state_interval = config.state_interval
        self._state_group = next((pool.group for pool in pools if pool.is_state), None)
        # With recurrent states no partly filled block can be matched.
        self._tails = config.enable_partial_reuse and self._state_group is None
        self._live: dict[int, Sequence] = {}
        self._pins: set[PinHandle] = set()

    # ---------------------------------------------------------------- queries

    def num_tokens(self, request_id: int) -> int:
        """Returns the number of tokens of the sequence, prompt and appended."""
        return self._get(request_id).num_tokens

    def tokens(self, request_id: int, start: int = 0) -> npt.NDArray[np.int32]:
        """Returns a copy of the sequence's tokens from `start` on, int32."""
        return np.frombuffer(bytes(self._get(request_id).tokens[4 * start :]), np.int32)

    def holds(self, request_id: int) -> bool:
        """Returns whether a sequence of this id is live."""
        return request_id in self._live

    def group_block_ids(self, request_id: int, group: int) -> npt.NDArray[np.int32]:
        """Returns the sequence's blocks in a pool group, in order of its tokens: an int32 copy.

        -1 stands for a block before the window, and for one that is not reserved yet.
        """
        return as_id_array(self._get(request_id).held[group].ids)

    def num_blocks(self, request_id: int, group: int = 0) -> int:
        """Returns how many blocks the sequence holds in a pool group."""
        sequence = self._get(request_id)
        held = sequence.held[group]
        missing = held.num_missing() if sequence.load_end else 0
        return held.stop - held.first - missing

    def num_ahead(self, request_id: int) -> tuple[int, ...]:
        """Returns for each pool group how many blocks a load fills behind unreserved ones.

        The sequence holds them beside the blocks of the tokens that it computes meanwhile.
        """
        sequence = self._get(request_id)
        if not sequence.load_end:
            return (0,) * len(self._pools)
        start = -(-sequence.reserved // self._tokens_per_block)
        missing = [held.num_missing(start) for held in sequence.held]
        return tuple(
            held.stop - start - gap if gap else 0
            for held, gap in zip(sequence.held, missing, strict=True)
        )

    def has_begun(self, request_id: int) -> bool:
        """Returns whether tokens have blocks that are computed beside a load."""
        sequence = self._get(request_id)
        return sequence.load_end > 0 and sequence.reserved > sequence.matched

    def block_keys(self, request_id: int) -> Items[BlockKey]:
        """Returns the chained keys of the sequence's full blocks.

        The sequence's `KeyChain` hashes each block once. If `add_sequence` got no chain, all are
        hashed now, and no store has such keys.
        """
        sequence = self._get(request_id)
        chain = sequence.chain
        if chain is None:
            root = root_key(b"", self._layouts, sequence.namespace)
            tokens = np.frombuffer(bytes(sequence.tokens), np.int32)
            chain = KeyChain(root, self._tokens_per_block, TokenBuffer(tokens))
        return chain.keys(0, sequence.num_tokens // self._tokens_per_block)

    def priorities(self, request_id: int, start: int = 0) -> list[int]:
        """Returns the retention priority of each block of the sequence from `start` on, in group 0.

        A block that the sequence does not hold has the priority in the request's retention.
        """
        sequence = self._get(request_id)
        held = sequence.held[0]
        found: list[int] = []
        for run in sequence.plan.runs(0, len(held.ids)):
            retention = held.inherited if run.inherited else run.retention
            found.extend([retention.priority] * (run.stop - run.start))
        for step in held.segments():
            priority = held.pool.published.effective_priority(step)
            found[step.start : step.end] = [priority] * len(step)
        return found[start:]

    # ---------------------------------------------------------------- growing and shrinking

    def reserve(self, request_id: int, num_tokens: int) -> None:
        """Allocates blocks of window pools up to position `num_tokens`, before a later chunk.

        Does nothing for tokens that have blocks. The last tokens before the end of a load have
        blocks already.

        Raises:
            ConfigurationError: (a ``ValueError``) `num_tokens` is beyond the sequence.
            OutOfBlocks: there are not enough blocks; nothing changed.
        """
        sequence = self._get(request_id)
        check_position("num_tokens", num_tokens, sequence.num_tokens)
        if num_tokens <= sequence.reserved:
            return
        stop = -(-num_tokens // self._tokens_per_block)
        start = -(-sequence.reserved // self._tokens_per_block)
        gaps = [held.ids[start : min(stop, held.stop)].count(NOT_HELD) for held in sequence.held]
        needs = [
            0 if held.pool.is_state else gap + max(stop - held.stop, 0)
            for held, gap in zip(sequence.held, gaps, strict=True)
        ]
        self._slabs.supply(needs)
        for held, gap, need in zip(sequence.held, gaps, needs, strict=True):
            ids = held.pool.allocate(need)
            sequence.fill(held, start, ids[:gap])
            sequence.fill(held, held.stop, ids[gap:])
        sequence.reserved = num_tokens

    def append_tokens(self, request_id: int, tokens: Tokens) -> None:
        """Appends `tokens` to the sequence, and allocates the blocks that they need.

        Raises:
            ConfigurationError: (a ``ValueError``) some tokens of the prompt have no blocks yet.
            OutOfBlocks: there are not enough blocks; nothing was appended.
        """
        sequence = self._get(request_id)
        added = as_token_array(tokens)
        if len(added) == 0:
            return
        _check_reserved(sequence, sequence.num_tokens)
        num_tokens = sequence.num_tokens + len(added)
        needed = -(-num_tokens // self._tokens_per_block) - sequence.num_blocks
        if needed > 0:
            self._slabs.supply([0 if pool.is_state else needed for pool in self._pools])
            for held in sequence.held:
                if held.pool.is_state:
                    held.ids.extend(no_ids(needed))
                    continue
                held.ids.extend(held.pool.allocate(needed))
                held.stop += needed
        sequence.tokens += added.tobytes()
        sequence.reserved = num_tokens

    def rewind(self, request_id: int, num_tokens: int) -> None:
        """Drops the last `num_tokens` tokens, and releases the blocks that have no other token.

        Raises:
            ConfigurationError: (a ``ValueError``) `num_tokens` is negative, or matched or committed
                tokens would be dropped.
        """
        sequence = self._get(request_id)
        keep = sequence.num_tokens - num_tokens
        if num_tokens < 0 or keep < max(sequence.computed, sequence.matched):
            raise ConfigurationError(
                f"num_tokens: {num_tokens} of {sequence.num_tokens} cannot be dropped; the first "
                f"{max(sequence.computed, sequence.matched)} are matched or committed"
            )
        if sequence.snapshot_end > keep:
            self._drop_snapshot(sequence)
            sequence.snapshot_end = 0
        blocks = -(-keep // self._tokens_per_block)
        for held in sequence.held:
            held.pool.private.drop(sequence.forget(held, blocks, sequence.num_blocks))
            held.stop = min(held.stop, blocks)
            held.first = min(held.first, held.stop)
        for pin in sequence.pins:
            for pinned in pin.held:
                pinned.end = min(pinned.end, blocks)
        for held in sequence.held:
            del held.ids[blocks:]
        del sequence.tokens[4 * keep :]
        sequence.plan.rewind(blocks)
        sequence.reserved = min(sequence.reserved, keep)

    # ---------------------------------------------------------------- valid KV

    def commit(self, request_id: int, num_computed_tokens: int) -> None:
        """Publishes the full blocks among the first `num_computed_tokens`, whose KV is valid.

        Window pools then release the blocks that lie wholly before the window of the next token. A
        call for fewer tokens than were committed does nothing. A call for the tokens of a load also
        releases the blocks of the tokens that were computed beside it.

        Raises:
            ConfigurationError: (a ``ValueError``) `num_computed_tokens` is beyond the sequence, or
                beyond its reserved tokens.
        """
        sequence = self._get(request_id)
        check_position("num_computed_tokens", num_computed_tokens, sequence.num_tokens)
        if num_computed_tokens <= sequence.computed:
            return
        self._join_load(sequence, num_computed_tokens)
        _check_reserved(sequence, num_computed_tokens)
        sequence.computed = num_computed_tokens
        self._settle_snapshot(sequence, num_computed_tokens)
        self._publish(sequence, num_computed_tokens // self._tokens_per_block)
        for held in sequence.held:
            if held.pool.window is not None and not held.pool.is_state:
                first = first_in_window(held.pool.window, num_computed_tokens)
                self._release_before(sequence, held, first // self._tokens_per_block)

    def _join_load(self, sequence: Sequence, num_valid: int) -> None:
        # The blocks between the last computed ones and those of the load hold nothing.
        if not 0 < sequence.load_end <= num_valid:
            return
        size = self._tokens_per_block
        for held in sequence.held:
            first = first_in_window(held.pool.window, sequence.load_end)
            self._release_before(sequence, held, first // size)
        stops = [held.stop for held in sequence.held if not held.pool.is_state]
        reserved = min(stops, default=sequence.num_blocks) * size
        sequence.reserved = max(sequence.reserved, min(reserved, sequence.num_tokens))
        sequence.load_end = 0

    def _settle_snapshot(self, sequence: Sequence, num_valid: int) -> None:
        # A chunk that went beyond the end of a snapshot had no state there to write.
        end = sequence.snapshot_end
        if end and end <= num_valid:
            if end < num_valid:
                self._drop_snapshot(sequence)
            sequence.snapshot_end = 0

    def _drop_snapshot(self, sequence: Sequence) -> None:
        if self._state_group is not None:
            number = sequence.snapshot_end // self._tokens_per_block
            self._release_before(sequence, sequence.held[self._state_group], number)

    def _release_before(self, sequence: Sequence, held: HeldBlocks, stop: int) -> None:
        if stop <= held.first:
            return
        private = sequence.forget(held, held.first, stop)
        outside = held.split_off(stop, self._tree.split)
        held.first, held.stop = stop, max(held.stop, stop)
        outside.let_go()
        held.pool.private.drop(private)

    # ---------------------------------------------------------------- the end

    def publish_ended(self, request_id: int, num_valid_tokens: int) -> None:
        """Publishes the valid blocks, tail included, of an ended sequence that keeps its blocks.

        `abort` or `release` later releases them, and publishes duplicates and the blocks after
        duplicates. The sequence must not change in between.

        Raises:
            ConfigurationError: (a ``ValueError``) `num_valid_tokens` is beyond the sequence.
        """
        sequence = self._get(request_id)
        check_position("num_valid_tokens", num_valid_tokens, sequence.num_tokens)
        self._join_load(sequence, num_valid_tokens)
        self._settle_snapshot(sequence, num_valid_tokens)
        blocks, tail = divmod(num_valid_tokens, self._tokens_per_block)
        self._publish(sequence, blocks)
        if self._publishes_tail(sequence, blocks, tail):
            Publication(self._tree, sequence).tail(blocks, tail)

    def release(self, request_id: int) -> None:
        """Ends the sequence: publishes its valid blocks, tail included, and releases all blocks.

        All tokens but the last must have valid KV.

        Raises:
            ConfigurationError: (a ``ValueError``) some tokens of the prompt have no blocks yet.
        """
        sequence = self._get(request_id)
        _check_reserved(sequence, sequence.num_tokens)
        # A block that was committed whole is published whole.
        committed = sequence.computed // self._tokens_per_block * self._tokens_per_block
        self._end(request_id, max(sequence.num_tokens - 1, committed))

    def abort(self, request_id: int, num_valid_tokens: int) -> None:
        """Ends the sequence like `release`, but only the first `num_valid_tokens` are valid.

        Blocks that were committed stay published.

        Raises:
            ConfigurationError: (a ``ValueError``) `num_valid_tokens` is beyond the sequence.
        """
        sequence = self._get(request_id)
        check_position("num_valid_tokens", num_valid_tokens, sequence.num_tokens)
        self._end(request_id, num_valid_tokens)

    def _end(self, request_id: int, num_valid: int) -> None:
        sequence = self._live.pop(request_id)
        self._join_load(sequence, num_valid)
        self._settle_snapshot(sequence, num_valid)
        self._publish_rest(sequence, num_valid)
        for held in sequence.held:
            private = sequence.hand_over(held, held.first, held.stop)
            held.let_go()
            held.pool.private.drop(private)
        sequence.disband()

    def _publish(self, sequence: Sequence, stop: int) -> None:
        # Publishes the full blocks before number `stop`, which stay held.
        first = sequence.attempted
        if stop > first and self._reuse:
            sequence.attempted = stop
            Publication(self._tree, sequence).blocks(first, stop)

    def _publish_rest(self, sequence: Sequence, num_valid: int) -> None:
        # Publishes the valid blocks at the end of `sequence`; the caller then releases them.
        if not self._reuse:
            return
        size = self._tokens_per_block
        blocks, tail = divmod(num_valid, size)
        self._publish(sequence, blocks)
        if sequence.is_published:
            return
        publication = Publication(self._tree, sequence, ends=True)
        if sequence.pins:
            publication.close_pinned(-(-num_valid // size))
        start = publication.first_private(blocks)
        if start < blocks:
            publication.blocks(start, blocks)
        if self._publishes_tail(sequence, blocks, tail):
            publication.tail(blocks, tail)

    def _publishes_tail(self, sequence: Sequence, blocks: int, tail: int) -> bool:
        committed = sequence.computed // self._tokens_per_block
        return bool(tail) and self._reuse and self._tails and blocks >= committed

    def _get(self, request_id: int) -> Sequence:
        try:
            return self._live[request_id]
        except KeyError:
            raise UnknownRequest(f"no live request has the id {request_id}") from None


def _check_reserved(sequence: Sequence, num_tokens: int) -> None:
    if num_tokens > sequence.reserved:
        raise ConfigurationError(
            f"request: blocks are reserved for {sequence.reserved} of its tokens, and this "
            f"needs {num_tokens}; call reserve first"
        )
