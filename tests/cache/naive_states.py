"""A naive model of snapshots of recurrent states: a pool whose window is one whole block."""

from __future__ import annotations

import naive_match
from naive_blocks import Block, check_position

from kvconnect import errors


class NaiveStates:
    """Part of `NaiveManager`. The states' pool, if there is one, is the last."""

    def state_pool(self):
        return self.pools[-1] if self.pools[-1].is_state else None

    def num_no_state_tokens(self):
        return self.no_state_tokens

    def check_begin(self, begin):
        if self.state_pool() and begin % self.size:
            raise errors.ConfigurationError("no state inside of a block")

    def note_states(self, seq, plan, max_matched):
        if not self.state_pool():
            return
        most = len(seq.tokens) - 1
        limit = most if max_matched is None else min(most, max_matched)
        if not self.config.enable_block_reuse:
            limit = 0
        others = self.pools[:-1]
        reach = naive_match.longest_whole(
            others, self.root(seq.space), seq.tokens, limit, self.size
        )
        seq.no_state = max(0, reach.length - max(plan.match.length, seq.external_end))
        self.no_state_tokens += seq.no_state
        seq.state_ends = {reach.length, most // self.size * self.size}

    def next_state_end(self, request_id, computed):
        seq, pool = self.sequence(request_id), self.state_pool()
        if not pool or not self.config.enable_block_reuse:
            return None
        in_answer = computed >= max(seq.state_ends)
        every = self.size if in_answer else self.config.state_interval
        held = {(at + 1) * self.size for at, block in enumerate(seq.blocks[pool]) if block}
        regular = {(computed // every + 1) * every}
        return min(end for end in held | regular | seq.state_ends if end > computed)

    def state_restore(self, request_id, computed):
        seq, pool = self.sequence(request_id), self.state_pool()
        if not pool or computed % self.size or computed == 0:
            return None
        block = seq.blocks[pool][computed // self.size - 1]
        return block.primary if block else None

    def state_snapshot(self, request_id, position):
        seq, pool = self.sequence(request_id), self.state_pool()
        check_position(position, seq)
        if position <= seq.computed:
            raise errors.ConfigurationError("committed")
        if not pool or position % self.size or not self.config.enable_block_reuse:
            return None
        blocks, at = seq.blocks[pool], position // self.size - 1
        if any(blocks[at + 1 :]):
            return None
        if blocks[at]:
            return None if blocks[at].node else blocks[at].primary
        seq.snapshot = 0
        for number, last in enumerate(blocks):
            if last:
                self.give_up(seq, pool, number + 1)
                end = (number + 1) * self.size
                passes = end > max(seq.state_ends) and end % self.config.state_interval
                if passes and last.node and not last.holders:
                    pool.drop(last)
        if not pool.free():
            return None
        [slot] = pool.take(1)
        blocks[at] = Block(slot)
        blocks[at].holders.append(seq)
        seq.snapshot = position
        return slot

    def settle_snapshot(self, seq, num_valid):
        """A snapshot counts if some chunk ended there."""
        if seq.snapshot and seq.snapshot <= num_valid:
            if seq.snapshot < num_valid:
                self.drop_snapshot(seq)
            seq.snapshot = 0

    def drop_snapshot(self, seq):
        self.give_up(seq, self.state_pool(), len(seq.blocks[self.state_pool()]))
        seq.snapshot = 0
