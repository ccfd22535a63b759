"""A naive model of the block manager, for tests to compare the real one with. See `naive_blocks`.

Its methods are those of `BlockManager`, and it raises kvconnect's errors: one test drives either.
"""

from __future__ import annotations

from dataclasses import astuple
from types import SimpleNamespace

import naive_match
from naive_blocks import Block, Node, Pin, Pool, Sequence, check_position, check_tokens
from naive_match import NaiveAdmission
from naive_publishing import NaivePublishing
from naive_states import NaiveStates

from kvconnect import errors


class NaiveManager(NaiveAdmission, NaivePublishing, NaiveStates):
    """`num_blocks` and `num_host_blocks` by window; the pools are in the order of the groups.

    With `states`, the pool of the smallest window is one of recurrent states.
    """

    def __init__(self, config, num_blocks, num_host_blocks, *, clock, copier, states=False):
        self.size = config.tokens_per_block
        self.config = config
        self.copier = copier
        windows = sorted(num_blocks, key=lambda window: -(window or float("inf")))
        self.pools = [
            Pool(
                group,
                window,
                num_blocks[window],
                num_host_blocks.get(window, 0),
                threshold=config.secondary_offload_min_priority,
                clock=clock,
                copier=self.copier,
                is_state=states and window == windows[-1],
            )
            for group, window in enumerate(windows)
        ]
        self.roots = {}
        self.sequences = {}
        self.pins = []
        self.no_state_tokens = 0

    # -------------------------------------------------------------- queries

    def pool(self, window):
        return next((pool for pool in self.pools if pool.window == window), self.pools[0])

    def num_free_blocks(self, *, window=None):
        return self.pool(window).free()

    def max_blocks(self, *, window=None):
        return self.pool(window).count

    def num_allocated_blocks(self, *, window=None):
        return self.pool(window).count - self.pool(window).free()

    def block_ids(self, request_id, *, window=None):
        blocks = self.sequence(request_id).blocks[self.pool(window)]
        return [-1 if block is None else block.primary for block in blocks]

    def sequence(self, request_id):
        if request_id not in self.sequences:
            raise errors.UnknownRequest(request_id)
        return self.sequences[request_id]

    def root(self, space):
        return self.roots.setdefault(space, Node())

    def resident(self):
        """What is published, by window, namespace and path."""
        return {
            (pool.window, space, node.path()): block
            for space, root in self.roots.items()
            for node in root.below()
            for pool, block in node.blocks.items()
        }

    def check_invariants(self):
        for pool in self.pools:
            for block in pool.published:
                for below in pool.descendants(block) if pool.window is None else ():
                    assert block.primary is not None or below.primary is None
                    assert block.holders or not below.holders

    # -------------------------------------------------------------- matching and admission

    def match(self, tokens, *, cache_salt=None, lora_id=None, extra_key=None):
        check_tokens(tokens)
        return self.find((cache_salt, lora_id, extra_key), tokens, None).length

    def can_add(
        self,
        tokens,
        *,
        cache_salt=None,
        lora_id=None,
        extra_key=None,
        max_matched=None,
        first_chunk=None,
        external_end=None,
    ):
        check_tokens(tokens)
        space = (cache_salt, lora_id, extra_key)
        return self.plan(space, tokens, max_matched, first_chunk, external_end) is not None

    def predict_match(self, prompt):
        space = astuple(prompt.namespace)
        tokens = memoryview(prompt.tokens).cast("i").tolist()
        plan = self.plan(space, tokens, None, None, None)
        return None if plan is None else plan.match.length

    def add_sequence(
        self,
        request_id,
        tokens,
        *,
        cache_salt=None,
        lora_id=None,
        extra_key=None,
        retention=None,
        keys=None,
        max_matched=None,
        first_chunk=None,
        external_end=None,
    ):
        if request_id in self.sequences:
            raise errors.DuplicateRequest(request_id)
        check_tokens(tokens)
        space = (cache_salt, lora_id, extra_key)
        plan = self.plan(space, tokens, max_matched, first_chunk, external_end)
        if plan is None:
            raise errors.OutOfBlocks
        seq = Sequence(space, tokens, retention, external_end or 0)
        self.note_states(seq, plan, max_matched)
        for pool in self.pools:
            self.fill(seq, pool, plan.match, plan.places[pool])
        if plan.match.source and not self.config.copy_on_partial_reuse:
            for pool in self.pools:
                if pool in plan.match.source.blocks:
                    pool.drop(plan.match.source.blocks[pool])
        seq.matched = seq.computed = plan.match.length
        seq.reserved = plan.end
        self.sequences[request_id] = seq
        return SimpleNamespace(
            matched_tokens=seq.matched, block_ids=self.block_ids(request_id, window=None)
        )

    # -------------------------------------------------------------- a running sequence

    def take_places(self, seq, numbers):
        """Fresh blocks for these numbers of each pool, in all pools or in none."""
        if any(len(numbers[pool]) > pool.free() for pool in self.pools):
            raise errors.OutOfBlocks
        for pool in self.pools:
            for number, slot in zip(numbers[pool], pool.take(len(numbers[pool])), strict=True):
                block = Block(slot)
                block.holders.append(seq)
                blocks = seq.blocks[pool]
                blocks += [None] * (number + 1 - len(blocks))
                blocks[number] = block

    def is_reserved(self, seq, num_tokens):
        windows = any(pool.window is not None and not pool.is_state for pool in self.pools)
        return not windows or num_tokens <= seq.reserved

    def reserve(self, request_id, num_tokens):
        seq = self.sequence(request_id)
        check_position(num_tokens, seq)
        begin, end = -(-seq.reserved // self.size), -(-num_tokens // self.size)
        self.take_places(
            seq,
            {
                pool: [] if pool.window is None or pool.is_state else range(begin, max(begin, end))
                for pool in self.pools
            },
        )
        seq.reserved = max(seq.reserved, num_tokens)

    def append_tokens(self, request_id, tokens):
        seq = self.sequence(request_id)
        if not tokens:
            return
        check_tokens(tokens)
        if not self.is_reserved(seq, len(seq.tokens)):
            raise errors.ConfigurationError("reserve first")
        begin = -(-len(seq.tokens) // self.size)
        end = -(-(len(seq.tokens) + len(tokens)) // self.size)
        numbers = dict.fromkeys(self.pools, range(begin, end))
        if self.state_pool():
            numbers[self.state_pool()] = ()
        self.take_places(seq, numbers)
        if self.state_pool():
            seq.blocks[self.state_pool()] += [None] * (end - begin)
        seq.tokens += tokens
        seq.reserved = len(seq.tokens)

    def commit(self, request_id, num_computed_tokens):
        seq = self.sequence(request_id)
        check_position(num_computed_tokens, seq)
        if not self.is_reserved(seq, num_computed_tokens):
            raise errors.ConfigurationError("reserve first")
        if num_computed_tokens <= seq.computed:
            return
        seq.computed = num_computed_tokens
        self.settle_snapshot(seq, num_computed_tokens)
        for pool in self.pools:
            if self.config.enable_block_reuse:
                self.publish_running(seq, pool, num_computed_tokens // self.size)
            if not pool.is_state:
                first = naive_match.first_block(pool, num_computed_tokens, self.size)
                self.give_up(seq, pool, first)

    def give_up(self, seq, pool, first):
        blocks = seq.blocks[pool]
        for number in reversed(range(min(first, len(blocks)))):
            block, blocks[number] = blocks[number], None
            if block:
                pool.let_go(seq, block)

    def rewind(self, request_id, num_tokens):
        seq = self.sequence(request_id)
        keep = len(seq.tokens) - num_tokens
        if num_tokens < 0 or keep < max(seq.computed, seq.matched):
            raise errors.ConfigurationError("committed")
        if seq.snapshot > keep:
            self.drop_snapshot(seq)
        del seq.tokens[keep:]
        seq.prompt = min(seq.prompt, keep)
        seq.reserved = min(seq.reserved, keep)
        for pool in self.pools:
            emptied = seq.blocks[pool][-(-keep // self.size) :]
            del seq.blocks[pool][-(-keep // self.size) :]
            for block in reversed(emptied):
                if block:
                    pool.let_go(seq, block)

    # -------------------------------------------------------------- its end

    def release(self, request_id):
        seq = self.sequence(request_id)
        if not self.is_reserved(seq, len(seq.tokens)):
            raise errors.ConfigurationError("abort instead")
        # A block that was committed whole is offered whole.
        self.end(request_id, max(len(seq.tokens) - 1, seq.computed // self.size * self.size))

    def abort(self, request_id, num_valid_tokens):
        check_position(num_valid_tokens, self.sequence(request_id))
        self.end(request_id, num_valid_tokens)

    def end(self, request_id, num_valid):
        seq = self.sequences.pop(request_id)
        self.settle_snapshot(seq, num_valid)
        if self.config.enable_block_reuse:
            pools = [pool for pool in self.pools if self.publishes(seq, pool, num_valid)]
            committed = num_valid // self.size < seq.computed // self.size
            tails = self.config.enable_partial_reuse and not self.state_pool()
            if num_valid % self.size and not committed and tails:
                self.publish_tail(seq, pools, num_valid)
        for pool in self.pools:
            self.give_up(seq, pool, len(seq.blocks[pool]))

    # -------------------------------------------------------------- pins

    def hold(self, blocks):
        pin = Pin(blocks)
        for held in blocks.values():
            for block in held:
                block.holders.append(pin)
        self.pins.append(pin)
        return pin

    def pin(self, request_id):
        seq = self.sequence(request_id)
        return self.hold({pool: [b for b in seq.blocks[pool] if b] for pool in self.pools})

    def pin_path(self, tokens, cache_salt=None, lora_id=None, extra_key=None):
        """`BlockManager.pin_keys` of the keys of the full blocks of `tokens`."""
        root = self.root((cache_salt, lora_id, extra_key))
        match = naive_match.longest_whole(self.pools, root, tokens, len(tokens), self.size)
        return self.hold(
            {
                pool: [
                    node.blocks[pool]
                    for node in match.path[naive_match.first_block(pool, match.length, self.size) :]
                ]
                for pool in self.pools
            }
        )

    def unpin(self, pin):
        if pin not in self.pins:
            raise errors.ConfigurationError("unpinned")
        self.pins.remove(pin)
        for pool, blocks in pin.blocks.items():
            for block in reversed(blocks):
                pool.let_go(pin, block)

    def detach(self, request_id, first_block):
        seq = self.sequence(request_id)
        total = -(-len(seq.tokens) // self.size)
        if not 0 <= first_block <= total:
            raise errors.ConfigurationError("no such block")
        old = {
            pool: [number for number in range(first_block, total) if seq.blocks[pool][number]]
            for pool in self.pools
        }
        blocks = {pool: [seq.blocks[pool][number] for number in old[pool]] for pool in self.pools}
        if any(block.node for held in blocks.values() for block in held):
            raise errors.ConfigurationError("published")
        states = self.state_pool()
        self.take_places(seq, old | {states: ()} if states else old)
        for number in old.get(states, ()):
            seq.blocks[states][number] = None
        for held in blocks.values():
            for block in held:
                block.holders.remove(seq)
        if seq.snapshot > first_block * self.size:
            seq.snapshot = 0
        seq.computed = min(seq.computed, first_block * self.size)
        seq.matched = min(seq.matched, first_block * self.size)
        for pool in self.pools:
            seq.duplicates[pool] -= {n for n in seq.duplicates[pool] if n >= first_block}
        return self.hold(blocks)

    def reset(self):
        if self.sequences or self.pins:
            raise errors.SequencesLive
        for pool in self.pools:
            for block in list(pool.published):
                pool.drop(block)
