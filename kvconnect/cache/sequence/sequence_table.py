"""The live sequences of a block manager."""

from __future__ import annotations

from kvconnect.cache.pool.held_blocks import HeldBlocks
from kvconnect.cache.pool.matching import first_in_window
from kvconnect.cache.pool.slabs import Slabs
from kvconnect.cache.sequence.publisher import Publisher
from kvconnect.cache.sequence.sequence import Sequence, check_position
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.errors import ConfigurationError, UnknownRequest
from kvconnect.tokens import Tokens, as_token_array

__all__ = ["SequenceTable"]


class SequenceTable:
    """Sequences by request id: how they grow and shrink, and how they end.

    Attributes:
        live: those that did not end.
    """

    def __init__(self, tree: RadixTree, slabs: Slabs, publisher: Publisher) -> None:
        self._tree = tree
        self._slabs = slabs
        self._publisher = publisher
        self._tokens_per_block = tree.tokens_per_block
        self.live: dict[int, Sequence] = {}

    def get(self, request_id: int) -> Sequence:
        """The sequence of that id.

        Raises:
            UnknownRequest: there is none.
        """
        try:
            return self.live[request_id]
        except KeyError:
            raise UnknownRequest(f"no live request has the id {request_id}") from None

    # ---------------------------------------------------------------- growing and shrinking

    def reserve(self, request_id: int, num_tokens: int) -> None:
        """See `BlockManager.reserve`."""
        sequence = self.get(request_id)
        check_position("num_tokens", num_tokens, sequence.num_tokens)
        if num_tokens <= sequence.reserved:
            return
        stop = -(-num_tokens // self._tokens_per_block)
        needs = [max(stop - held.stop, 0) for held in sequence.held]
        self._slabs.supply(needs)
        for held, need in zip(sequence.held, needs, strict=True):
            held.ids[held.stop : held.stop + need] = held.pool.allocate(need)
            held.stop += need
        sequence.reserved = num_tokens

    def append_tokens(self, request_id: int, tokens: Tokens) -> None:
        """See `BlockManager.append_tokens`."""
        sequence = self.get(request_id)
        added = as_token_array(tokens)
        if len(added) == 0:
            return
        _check_reserved(sequence, sequence.num_tokens)
        num_tokens = sequence.num_tokens + len(added)
        needed = -(-num_tokens // self._tokens_per_block) - sequence.num_blocks
        if needed > 0:
            self._slabs.supply([needed] * len(sequence.held))
            for held in sequence.held:
                held.ids.extend(held.pool.allocate(needed))
                held.stop += needed
        sequence.tokens += added.tobytes()
        sequence.reserved = num_tokens

    def rewind(self, request_id: int, num_tokens: int) -> None:
        """See `BlockManager.rewind`."""
        sequence = self.get(request_id)
        keep = sequence.num_tokens - num_tokens
        if num_tokens < 0 or keep < max(sequence.computed, sequence.matched):
            raise ConfigurationError(
                f"num_tokens: {num_tokens} of {sequence.num_tokens} cannot be dropped; the first "
                f"{max(sequence.computed, sequence.matched)} are matched or committed"
            )
        blocks = -(-keep // self._tokens_per_block)
        for held in sequence.held:
            held.pool.private.drop(sequence.forget(held, blocks, sequence.num_blocks))
            held.stop = min(held.stop, blocks)
        for pin in sequence.pins:
            for pinned in pin.held:
                pinned.end = min(pinned.end, blocks)
        for held in sequence.held:
            del held.ids[blocks:]
        del sequence.tokens[4 * keep :]
        sequence.reserved = min(sequence.reserved, keep)

    # ---------------------------------------------------------------- valid KV

    def commit(self, request_id: int, num_computed_tokens: int) -> None:
        """See `BlockManager.commit`."""
        sequence = self.get(request_id)
        check_position("num_computed_tokens", num_computed_tokens, sequence.num_tokens)
        if num_computed_tokens <= sequence.computed:
            return
        _check_reserved(sequence, num_computed_tokens)
        sequence.computed = num_computed_tokens
        self._publisher.commit(sequence, num_computed_tokens // self._tokens_per_block)
        for held in sequence.held:
            if held.pool.window is not None:
                first = first_in_window(held.pool.window, num_computed_tokens)
                self._give_up(sequence, held, first // self._tokens_per_block)

    def _give_up(self, sequence: Sequence, held: HeldBlocks, stop: int) -> None:
        if stop <= held.first:
            return
        private = sequence.forget(held, held.first, stop)
        outside = held.split_off(stop, self._tree.split)
        held.first = stop
        outside.let_go()
        held.pool.private.drop(private)

    # ---------------------------------------------------------------- the end

    def release(self, request_id: int) -> None:
        """See `BlockManager.release`."""
        sequence = self.get(request_id)
        _check_reserved(sequence, sequence.num_tokens)
        self._end(request_id, sequence.num_tokens - 1)

    def abort(self, request_id: int, num_valid_tokens: int) -> None:
        """See `BlockManager.abort`."""
        sequence = self.get(request_id)
        check_position("num_valid_tokens", num_valid_tokens, sequence.num_tokens)
        self._end(request_id, num_valid_tokens)

    def _end(self, request_id: int, num_valid: int) -> None:
        sequence = self.live.pop(request_id)
        self._publisher.finish(sequence, num_valid)
        for held in sequence.held:
            private = sequence.hand_over(held, held.first, held.stop)
            held.let_go()
            held.pool.private.drop(private)
        sequence.disband()


def _check_reserved(sequence: Sequence, num_tokens: int) -> None:
    if num_tokens > sequence.reserved:
        raise ConfigurationError(
            f"request: blocks are reserved for {sequence.reserved} of its tokens, and this "
            f"needs {num_tokens}; call reserve first"
        )
