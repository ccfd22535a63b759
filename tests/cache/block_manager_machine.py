"""Drives a block manager and the naive model of its specification alike, and compares them.

Every physical slot has a content here, and copies happen as they are ordered: whatever is matched
must be what was computed for those tokens.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from event_replay import EventReplay
from hypothesis import note
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from naive_manager import NaiveManager
from slot_content import SlotContent
from small_prompts import chain_of

from kvconnect.cache.admission.prompt import Prompt
from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.pool import matching
from kvconnect.config import KvCacheConfig, KvCacheRetentionConfig
from kvconnect.errors import KvConnectError
from kvconnect.keys import BlockKey, Namespace, chain_key
from kvconnect.layout import KvCacheLayout, StateTensor

SALTS = [None, "a", "b"]
ROOTS = {salt: BlockKey(bytes([number]) * 32) for number, salt in enumerate(SALTS)}
PRIORITIES = [0, 20, 35, 35, 50, 90]
DURATIONS = [None, None, 1000, 3000]
WINDOWS = [[None], [None], [None, 4], [None, 6, 3], [6], [9, 2], [None, 12, 5, 2]]


STATES = [[None], [None], [None, 9], [6], []]
"""The windows beside a pool of states."""


def key_of(salt, path, size):
    key = ROOTS[salt]
    for start in range(0, len(path), size):
        key = chain_key(key, np.array(path[start : start + size], np.int32))
    return key


def some_tokens(random, most):
    # Few tokens and short prompts: paths meet, branch and fill the pool all the time.
    return [random.randint(0, 1) for _ in range(random.randint(0, most))]


def some_retention(random):
    """Ranges that do not overlap, and a decode policy."""
    bounds = sorted(random.sample(range(15), random.randint(0, 4)))
    return KvCacheRetentionConfig(
        token_range_retention_configs=[
            {
                "token_start": start,
                "token_end": end,
                "priority": random.choice(PRIORITIES),
                "duration_ms": random.choice(DURATIONS),
            }
            for start, end in itertools.pairwise(bounds)
            if random.random() < 0.7
        ],
        decode_retention_priority=random.choice(PRIORITIES),
        decode_duration_ms=random.choice(DURATIONS),
    )


def some_config(random):
    return KvCacheConfig(
        tokens_per_block=random.choice([2, 2, 4]),
        state_interval=random.choice([4, 8, 16]),
        enable_block_reuse=random.random() < 0.95,
        enable_partial_reuse=random.random() < 0.8,
        copy_on_partial_reuse=random.random() < 0.6,
        secondary_offload_min_priority=random.choice([0, 0, 20, 35, 50]),
        event_buffer_max_size=random.choice([0, 10_000]),
    )


def some_pools(random, size, *, states):
    """Blocks of each pool, in primary and on the host."""
    windows = [*random.choice(STATES), size] if states else random.choice(WINDOWS)
    primary = {window: random.randint(3, 12) for window in windows}
    host = dict.fromkeys(windows, 0)
    if random.random() < 0.7:
        host = {window: random.choice([0, 1, 2, 4, 8, 16]) for window in windows}
    return primary, host


class BlockManagerMachine(RuleBasedStateMachine):
    """Every call goes to both; results, errors, counts, shared ids and what matches must agree.

    Hypothesis chooses the seeds of the steps, and shrinks by leaving steps out.
    """

    states = False  # whether there is a pool of recurrent states

    def __init__(self):
        super().__init__()
        self.names = itertools.count()
        self.now = 0.0
        self.handles = []
        self.detached = {}  # of each handle of a detachment: ids of each group
        self.pinned = {}  # of each other handle: what must be checked of it, see `keep`
        self.loading = set()  # sequences that an external store has not filled yet
        self.probes = [([0], None)]

    @initialize(random=st.randoms(use_true_random=True))
    def start(self, random):
        config = some_config(random)
        primary, host = some_pools(random, config.tokens_per_block, states=self.states)
        # Whether a few candidates for a partial match are many.
        matching.FEW, matching.MANY = random.choice([(1, 1), (1, 3), (2, 512), (8, 512)])
        note(f"{config!r} {primary} {host} {matching.FEW} {matching.MANY}")
        self.churn = random.random() < 0.6
        self.size = config.tokens_per_block
        self.windows = list(primary)
        self.content = SlotContent(self.size)
        self.expected = SlotContent(self.size)
        self.naive = NaiveManager(
            config,
            primary,
            host,
            clock=lambda: self.now,
            copier=self.expected,
            states=self.states,
        )
        self.manager = self.make(config, primary, host)
        self.replay = EventReplay(primary, host) if config.event_buffer_max_size else None

    def teardown(self):
        matching.FEW, matching.MANY = 8, 512

    def make(self, config, primary, host):
        layouts = [
            KvCacheLayout(1, 1, 1, 1, self.size, torch.float32, window) for window in self.windows
        ]
        if self.states:
            tensor = StateTensor(1, "recurrent", (2,), torch.float32)
            layouts[-1] = KvCacheLayout.of_states([tensor], self.size)
        return BlockManager(
            config,
            layouts,
            num_blocks=primary,
            num_host_blocks=host,
            copier=self.content,
            clock=lambda: self.now,
        )

    @rule(random=st.randoms(use_true_random=True))
    def step(self, random):
        live = len(self.naive.sequences)
        steps = {self.add: 6, self.serve: 2, self.pin_keys: 1, self.advance: 1, self.reset: 0.2}
        if live:
            steps |= {self.append: 3, self.commit: 6, self.release: 2 * live, self.abort: live}
            steps |= {self.rewind: 1, self.pin: 1, self.detach: 1, self.reserve: 3}
            if self.states:
                steps[self.snapshot] = 6
        if self.churn:
            # Few blocks are held: what requests left fills both tiers, and comes back.
            steps |= {self.add: 2, self.serve: 20}
        if self.handles:
            steps[self.unpin] = 2 * len(self.handles)
        call = random.choices(list(steps), list(steps.values()))[0]
        note(call.__name__)
        call(random)
        self.check()

    # -------------------------------------------------------------- what is compared

    def chain(self, tokens, salt):
        return chain_of(tokens, self.size, ROOTS[salt])

    def both(self, name, *args, **kwargs):
        """The results of both, or ``None`` twice if both refuse in the same way."""
        try:
            expected = getattr(self.naive, name)(*args, **kwargs)
        except KvConnectError as error:
            with pytest.raises(type(error)):
                getattr(self.manager, name)(*args, **kwargs)
            return None, None
        return expected, getattr(self.manager, name)(*args, **kwargs)

    def check(self):
        naive, manager = self.naive, self.manager
        naive.check_invariants()
        manager.check_invariants()
        self.check_orders()
        for window in self.windows:
            for count in ("num_free_blocks", "num_allocated_blocks", "max_blocks"):
                got, expected = (getattr(m, count)(window=window) for m in (manager, naive))
                assert got == expected, f"{count}(window={window})"
        self.check_blocks()
        self.check_states()
        self.check_events()
        for tokens, salt in self.probes[-12:]:
            query = [*tokens, 9]
            expected = naive.match(query, cache_salt=salt)
            got = manager.match(query, cache_salt=salt)
            assert got == expected, f"{query} of {salt}"
        for tokens, salt in self.probes[-2:]:
            prompt = Prompt.of(tokens, Namespace(salt))
            assert manager.predict_match(prompt) == naive.predict_match(prompt)
        for ids in self.detached.values():
            for group, held in enumerate(ids):
                self.content.scribble(group, held, 0)

    def check_orders(self):
        got, expected = self.content.orders, self.expected.orders
        for pool in self.naive.pools:
            for name in ("onboard", "copy_tokens", "move"):
                assert got[name, pool.group] == expected[name, pool.group], (name, pool.window)
            # What is offloaded and displaced within one call need not be copied at all.
            stayed = sum(block.host is not None for block in pool.offloaded)
            assert stayed <= got["offload", pool.group] <= len(pool.offloaded), pool.window
            pool.offloaded.clear()
        got.clear()
        expected.clear()

    def check_blocks(self):
        ids = {}
        for name, seq in self.naive.sequences.items():
            for group, pool in enumerate(self.naive.pools):
                held = self.manager.block_ids(name, window=pool.window)
                self.bind(ids, pool, seq.blocks[pool], held)
                salt = seq.space[0]
                self.content.check(group, held, salt, seq.tokens, self.end_in(pool, seq.computed))
                # The engine may write beyond what is computed at any time.
                self.content.scribble(group, held, self.end_in(pool, seq.computed))
            first = self.naive.pools[0]
            assert list(self.manager.block_ids(name)) == list(
                self.manager.block_ids(name, window=first.window)
            )
            self.check_priorities(name, seq, first)
        for pin, handle in self.handles:
            first = self.naive.pools[0]
            if -1 not in handle.block_ids:
                self.bind(ids, first, pin.blocks[first], list(handle.block_ids))
            for group, slot, offset, name in self.pinned.get(handle, ()):
                assert self.content.primary[group, slot][offset] == name, "a pin keeps the content"
        assert len({(block.pool, slot) for block, slot in ids.items()}) == len(ids)

    def end_in(self, pool, num_tokens):
        """Where the content of `pool` ends: a state is one of a whole block."""
        return num_tokens // self.size * self.size if pool.is_state else num_tokens

    def check_states(self):
        naive, manager = self.naive, self.manager
        assert manager.num_no_state_tokens() == naive.num_no_state_tokens()
        for name, seq in naive.sequences.items():
            expected = naive.next_state_end(name, seq.computed)
            assert manager.next_state_end(name, seq.computed) == expected
            for computed in (seq.computed, seq.external_end):
                block = manager.state_restore(name, computed)
                assert (block is None) == (naive.state_restore(name, computed) is None)
                if block is not None:
                    held = manager.block_ids(name, window=self.windows[-1])
                    assert block == held[computed // self.size - 1]

    def check_events(self):
        if self.replay:
            self.replay.take(self.manager.take_events())
            expected = {
                (window, key_of(space[0], path, self.size)): (int(block.primary is None), block)
                for (window, space, path), block in self.naive.resident().items()
            }
            found = self.replay.found
            assert found.keys() == expected.keys()
            for key, (level, block) in expected.items():
                assert found[key] == (level, block.priority)

    def check_priorities(self, name, seq, pool):
        got = self.manager.priorities(name)
        for number, block in enumerate(seq.blocks[pool]):
            if block:
                asked = seq.asked(pool, number, self.size) or (35, None)
                assert got[number] == (pool.priority(block) if block.node else asked[0])

    def bind(self, ids, pool, blocks, found):
        assert len(blocks) == len(found)
        for block, slot in zip(blocks, found, strict=True):
            assert (block is None) == (slot == -1)
            if block:
                block.pool = pool
                assert ids.setdefault(block, slot) == slot, "one block has one id"

    # -------------------------------------------------------------- the calls

    def pick(self, random, name=None):
        return random.choice(list(self.naive.sequences)) if name is None else name

    def some_prompt(self, random):
        tokens, salt = [random.randint(0, 1), *some_tokens(random, 3 * self.size)], None
        if random.random() < 0.2:
            salt = random.choice(SALTS)
        if random.random() < 0.7:
            # Go on from something known, or repeat it; what is long ago may be on the host.
            known, salt = random.choice(self.probes[-random.choice([6, 40]) :])
            keep = random.choice([len(known), random.randint(1, len(known))])
            tokens = (known[:keep] + some_tokens(random, 4))[: 6 * self.size]
        return tokens, salt

    def add(self, random):
        tokens, salt = self.some_prompt(random)
        given = {"cache_salt": salt}
        if random.random() < 0.15:
            given["max_matched"] = random.randint(0, 12)
        if random.random() < 0.3:
            given["first_chunk"] = random.randint(1, 10)
        loads = random.random() < 0.2 and self.load(random, tokens, given)
        expected, got = self.both("can_add", tokens, **given)
        assert got == expected
        fits, name = expected, next(self.names)
        if random.random() < 0.4:
            given["retention"] = some_retention(random)
        given["keys"] = self.chain(tokens, salt)
        expected, got = self.both("add_sequence", name, tokens, **given)
        assert (got is not None) == fits
        self.probes.append((tokens, salt))
        if fits:
            assert got.matched_tokens == expected.matched_tokens
            assert list(got.block_ids) == list(self.manager.block_ids(name))
        if fits and loads:
            self.loading.add(name)
        return name if fits else None

    def serve(self, random):
        """A whole request."""
        name = self.add(random)
        for call in (self.commit, self.append, self.commit):
            if name is not None and random.random() < 0.7:
                self.check()
                call(random, name)
        if name is not None and name not in self.loading:
            self.check()
            self.both("reserve", name, len(self.naive.sequences[name].tokens))
            self.release(random, name)

    def load(self, random, tokens, given):
        """Let an external store fill some tokens beyond the match, mostly from a whole block on."""
        space = (given["cache_salt"], None, None)
        reach = self.naive.find(space, tokens, None).length
        if random.random() < 0.7:
            given["max_matched"] = reach = reach // self.size * self.size
        if reach >= len(tokens) - 1:
            return False
        end = random.randint(reach + 1, len(tokens) - 1)
        if self.states:
            end -= end % self.size
        given["external_end"] = end
        return end > reach

    def snapshot(self, random, name=None):
        """The next chunk will end where a snapshot is due, or somewhere."""
        name = self.pick(random, name)
        if name in self.loading:
            return
        seq = self.naive.sequences[name]
        end = self.naive.next_state_end(name, seq.computed)
        if end is None or random.random() < 0.3:
            end = random.choice(range(0, len(seq.tokens) + 2 * self.size, self.size))
        expected, got = self.both("state_snapshot", name, end)
        assert (expected is None) == (got is None)
        if got is not None:
            held = self.manager.block_ids(name, window=self.windows[-1])
            assert got == held[end // self.size - 1]

    def settle(self, random, name, num_tokens):
        """Reserve up to a whole block, or all: what may be done in between is not specified."""
        seq = self.naive.sequences[name]
        if seq.reserved % self.size and seq.reserved < len(seq.tokens):
            end = min(len(seq.tokens), -(-seq.reserved // self.size) * self.size)
            self.both("reserve", name, end)
        return num_tokens <= seq.reserved

    def reserve(self, random):
        name = self.pick(random)
        count = random.randint(0, len(self.naive.sequences[name].tokens) + 1)
        self.both("reserve", name, count)

    def append(self, random, name=None):
        name, tokens = self.pick(random, name), some_tokens(random, 5)
        if name in self.loading:
            return
        seq = self.naive.sequences[name]
        self.settle(random, name, 0)
        self.both("append_tokens", name, tokens)
        if seq.tokens:
            self.probes.append((list(seq.tokens), seq.space[0]))

    def compute(self, name, stop):
        """The KV of the tokens up to `stop` is written to the sequence's blocks."""
        seq = self.naive.sequences[name]
        stop = min(stop, len(seq.tokens))
        for group, pool in enumerate(self.naive.pools):
            held = self.manager.block_ids(name, window=pool.window)
            if pool.is_state:
                # A state is written where a chunk ends, and where a load does.
                for end in {stop, min(stop, seq.external_end)} - {0}:
                    if end % self.size == 0:
                        written = (seq.space[0], seq.tokens, end - self.size, end)
                        self.content.write(group, held, *written)
                continue
            self.content.write(group, held, seq.space[0], seq.tokens, seq.computed, stop)

    def commit(self, random, name=None):
        name = self.pick(random, name)
        seq = self.naive.sequences[name]
        if self.states and random.random() < 0.7:
            self.snapshot(random, name)
        most = len(seq.tokens)
        self.settle(random, name, 0)
        count = random.choice(
            [most, seq.reserved, min(most, seq.reserved), random.randint(0, most + 1)]
        )
        if seq.snapshot and random.random() < 0.7:
            count = seq.snapshot
        if name in self.loading and seq.computed < count < seq.external_end:
            count = seq.external_end
        if count <= most and self.naive.is_reserved(seq, count):
            self.compute(name, count)
            if count >= seq.external_end:
                self.loading.discard(name)
        self.both("commit", name, count)

    def rewind(self, random):
        name, count = self.pick(random), random.randint(0, 6)
        seq = self.naive.sequences[name]
        if name not in self.loading and self.naive.is_reserved(seq, len(seq.tokens)):
            self.both("rewind", name, count)

    def release(self, random, name=None):
        name = self.pick(random, name)
        if name in self.loading:
            return
        seq = self.naive.sequences[name]
        self.settle(random, name, 0)
        if self.naive.is_reserved(seq, len(seq.tokens)):
            self.compute(name, len(seq.tokens) - 1)
        self.both("release", name)

    def abort(self, random):
        name = self.pick(random)
        seq = self.naive.sequences[name]
        count = random.randint(0, len(seq.tokens) + 1)
        if name in self.loading:
            count = min(count, seq.computed)
        elif count <= len(seq.tokens) and not self.naive.is_reserved(seq, count):
            count = seq.reserved
        if count <= len(seq.tokens):
            self.compute(name, count)
            self.loading.discard(name)
        self.both("abort", name, count)

    def pin(self, random):
        name = self.pick(random)
        seq = self.naive.sequences[name]
        pair = self.both("pin", name)
        self.handles.append(pair)
        self.pinned[pair[1]] = [
            (
                group,
                ids[at // self.size],
                at % self.size,
                (seq.space[0], tuple(seq.tokens[: at + 1])),
            )
            for group, window in enumerate(self.windows)
            for ids in [list(self.manager.block_ids(name, window=window))]
            for at in range(self.end_in(self.naive.pools[group], seq.computed))
            if ids[at // self.size] >= 0
        ]

    def pin_keys(self, random):
        tokens, salt = random.choice(self.probes[-10:])
        expected = self.naive.pin_path(tokens, salt)
        self.handles.append((expected, self.pin_path(tokens, salt)))

    def pin_path(self, tokens, salt):
        return self.manager.pin_keys(self.chain(tokens, salt).keys())

    def detach(self, random):
        name = self.pick(random)
        seq = self.naive.sequences[name]
        total = -(-len(seq.tokens) // self.size)
        first = random.randint(0, total + 1)
        held = [self.manager.block_ids(name, window=window) for window in self.windows]
        for ids in held[: -1 if self.states else None]:
            # What a window gave up could never be computed again.
            gaps = [number for number in range(first, total) if ids[number] == -1]
            if any(number < seq.reserved // self.size for number in gaps):
                return
        pair = self.both("detach", name, first)
        if pair[0] is not None:
            self.handles.append(pair)
            self.detached[pair[1]] = ids = [list(ids[first:]) for ids in held]
            # Who pinned them before finds in them what the transfer writes.
            written = {(group, slot) for group, slots in enumerate(ids) for slot in slots}
            for handle, kept in self.pinned.items():
                self.pinned[handle] = [entry for entry in kept if entry[:2] not in written]

    def unpin(self, random):
        pin, handle = self.handles.pop(random.randrange(len(self.handles)))
        self.naive.unpin(pin)
        self.manager.unpin(handle)
        self.detached.pop(handle, None)
        self.pinned.pop(handle, None)
        with pytest.raises(ValueError, match="handle"):
            self.manager.unpin(handle)

    def advance(self, random):
        self.now += random.choice([0.5, 1.0, 2.5])

    def reset(self, random):
        self.both("reset")
