"""The snapshots of recurrent states that live sequences take and start from."""

from __future__ import annotations

from kvconnect.cache.pool.held_blocks import NOT_HELD, HeldBlocks
from kvconnect.cache.sequence.sequence import Sequence, check_position
from kvconnect.cache.sequence.sequence_table import SequenceTable
from kvconnect.errors import ConfigurationError


class StateTable(SequenceTable):
    """The live sequences, with the calls for snapshots of their recurrent states.

    The snapshots are the blocks of one pool, a window of one block. A sequence holds at most one of
    them: the one that it starts from, or the one that it took last. While it computes beside a
    load, it also holds the block that the load fills. A published snapshot that no sequence holds
    can be reclaimed like any block of a window pool.

    While an answer is generated, every end of a block gets a snapshot, so that the next turn of the
    conversation can start from the last one. Those before the last one are dropped, but for those
    at a multiple of ``state_interval``. `BaseKVCacheManager` describes when an engine makes these
    calls.
    """

    def next_state_end(self, request_id: int, computed: int) -> int | None:
        """Returns the first position after `computed` at which a snapshot is due.

        It is the nearest of these:

        - a multiple of ``state_interval``
        - the end of the last whole block that a repeat of the prompt can match
        - the end of the cached path that the sequence has left, if a state was missing there
        - beyond that, in the answer, the end of a block
        - the end of the block that `state_snapshot` allocated last
        - the end of the block that a load fills

        The result may lie beyond the sequence. Without recurrent states, and without reuse, it is
        ``None``. Changes nothing.
        """
        sequence = self._get(request_id)
        held = self._state(sequence)
        if held is None or not self._reuse:
            return None
        is_answer = computed >= sequence.state_ends[-1]
        interval = self._tokens_per_block if is_answer else self._state_interval
        regular = computed // interval * interval + interval
        allocated = self._end_of_own(sequence, held) * self._tokens_per_block
        ends = (*sequence.state_ends, allocated, sequence.load_end, regular)
        return min(end for end in ends if end > computed)

    def state_restore(self, request_id: int, computed: int) -> int | None:
        """Returns the block with the states after the first `computed` tokens, or ``None``.

        The sequence holds the block until its next snapshot. If a load fills its later tokens, it
        releases the block now: the caller has to copy it before the next call.
        """
        sequence = self._get(request_id)
        held = self._state(sequence)
        number, rest = divmod(computed, self._tokens_per_block)
        if held is None or rest or not held.first < number <= held.stop:
            return None
        block = held.ids[number - 1]
        if computed < sequence.load_end:
            self._release_before(sequence, held, number)
        return None if block == NOT_HELD else block

    def state_snapshot(self, request_id: int, position: int) -> int | None:
        """Allocates the block for the states at `position`, which the caller fills.

        The `commit` of exactly `position` tokens publishes the block. A commit of more tokens, and
        a `rewind` to fewer, drop it: nothing was written then, or tokens that were rejected.
        Returns ``None`` if no snapshot is to be taken: no block is free, or `position` is not the
        end of a block, or the sequence holds that block or a later one. A second call for one
        position returns the same block. A call for the end of a load returns the load's block.
        Releases the block that the sequence held before. May order copies, and may reclaim
        published blocks.

        Raises:
            ConfigurationError: (a ``ValueError``) `position` is beyond the sequence, or was
                committed before.
        """
        sequence = self._get(request_id)
        check_position("position", position, sequence.num_tokens)
        if position <= sequence.computed:
            raise ConfigurationError(f"position: {position} was committed before")
        held = self._state(sequence)
        number, rest = divmod(position, self._tokens_per_block)
        if held is None or rest or not self._reuse:
            return None
        if number < self._end_of_own(sequence, held):
            return None
        if held.ids[number - 1] != NOT_HELD:
            return None if held.covers(number - 1) else held.ids[number - 1]
        self._release_state(sequence, held)
        needs = [int(pool is held.pool) for pool in self._pools]
        if not self._slabs.ensure_free(needs):
            return None
        held.first, held.stop = number - 1, max(number, sequence.load_end // self._tokens_per_block)
        sequence.fill(held, number - 1, held.pool.allocate(1))
        sequence.snapshot_end = position
        return held.ids[number - 1]

    def _end_of_own(self, sequence: Sequence, held: HeldBlocks) -> int:
        """Returns the number of blocks up to its last snapshot, without the one that a load fills.

        Returns 0 if it holds no such snapshot.
        """
        if held.first == held.stop or held.ids[held.first] == NOT_HELD:
            return 0
        end = held.first + 1
        return 0 if end * self._tokens_per_block == sequence.load_end else end

    def _release_state(self, sequence: Sequence, held: HeldBlocks) -> None:
        own = self._end_of_own(sequence, held)
        end = own * self._tokens_per_block
        passes = end > sequence.state_ends[-1] and end % self._state_interval
        segment, pool = held.segment, held.pool
        self._release_before(sequence, held, own)
        sequence.snapshot_end = 0
        if passes and segment is not None and not segment.pools[pool.group].references:
            pool.discard(segment)

    def _state(self, sequence: Sequence) -> HeldBlocks | None:
        group = self._state_group
        return None if group is None else sequence.held[group]
