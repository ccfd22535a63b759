"""The block manager against a naive model of its specification, op by op.

The model goes block by block, as slowly and plainly as the specification reads, and shares no code
with kvconnect. Its blocks are objects; the machine at the end maps them to ids.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvconnect.cache.block_manager import BlockManager
from kvconnect.config import KvCacheConfig, KvCacheRetentionConfig
from kvconnect.errors import ConfigurationError, OutOfBlocks, SequencesLive
from kvconnect.keys import BlockKey, KeyChain
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import TokenBuffer


class Full(Exception):
    """Not enough blocks."""


class Wrong(Exception):
    """The call breaks a rule."""


class Block:
    def __init__(self):
        self.holders = []  # sequences and pins, each once
        self.parent = None
        self.tokens = ()
        self.children = []
        self.published = None  # when; None: private
        self.used = None  # when it was last let go, or copied from
        self.priority = 35
        self.duration = None
        self.since = None


class Seq:
    def __init__(self, space, tokens, ranges, decode):
        self.space = space
        self.tokens = list(tokens)
        self.prompt = len(tokens)
        self.ranges = ranges
        self.decode = decode
        self.blocks = []
        self.computed = 0
        self.matched = 0
        self.duplicate = None
        self.inherited = {}


class Pin:
    def __init__(self, blocks):
        self.blocks = list(blocks)


class NaiveBlocks:
    def __init__(self, size, count, *, partial, copy):
        self.size, self.count, self.partial, self.copy = size, count, partial, copy
        self.now = 0.0
        self.ticks = 0
        self.blank = count
        self.roots = {}
        self.seqs = {}
        self.pins = []
        self.copies = 0

    # -------------------------------------------------------------- what is there

    def root(self, space):
        return self.roots.setdefault(space, Block())

    def tree(self):
        found, waiting = [], list(self.roots.values())
        while waiting:
            children = waiting.pop().children
            found += children
            waiting += children
        return found

    def free(self):
        return self.blank + sum(not block.holders for block in self.tree())

    def priority(self, block):
        return 35 if self.ran_out(block) else block.priority

    def ran_out(self, block):
        limited = block.duration is not None and block.since is not None
        return limited and self.now >= block.since + block.duration

    def tick(self):
        self.ticks += 1
        return self.ticks

    # -------------------------------------------------------------- matching

    def child(self, node, tokens):
        return next((child for child in node.children if child.tokens == tuple(tokens)), None)

    def piece(self, tokens, block):
        return tuple(tokens[block * self.size : (block + 1) * self.size])

    def find(self, space, tokens, limit):
        """Whole blocks matched, the partial source or None, tokens matched in it."""
        path, node = [], self.root(space)
        while (len(path) + 1) * self.size <= limit:
            below = self.child(node, self.piece(tokens, len(path)))
            if below is None:
                break
            path.append(below)
            node = below
        rest = tokens[len(path) * self.size : limit]
        best, key = None, (0,)
        for child in node.children if self.partial else ():
            if not self.copy and (child.holders or child.children):
                continue
            shared = 0
            while (
                shared < min(len(rest), len(child.tokens)) and rest[shared] == child.tokens[shared]
            ):
                shared += 1
            mine = (shared, -1 if child.used is None else child.used, child.published)
            if shared and mine > key:
                best, key = child, mine
        return path, best, key[0]

    def limit(self, tokens, most):
        return len(tokens) - 1 if most is None else min(len(tokens) - 1, most)

    def match(self, space, tokens, most=None):
        path, _, shared = self.find(space, tokens, self.limit(tokens, most))
        return len(path) * self.size + shared

    def plan(self, space, tokens, most):
        path, source, shared = self.find(space, tokens, self.limit(tokens, most))
        total = -(-len(tokens) // self.size)
        for used in [source, None] if source else [None]:
            kept = [*path, used] if used else path
            others = self.blank + sum(
                not block.holders and block not in kept for block in self.tree()
            )
            takes = total - len(path) - (1 if used and not self.copy else 0)
            if takes <= others:
                return path, used, shared if used else 0, total
        return None

    def can_add(self, space, tokens, most=None):
        return self.plan(space, tokens, most) is not None

    # -------------------------------------------------------------- taking and giving blocks

    def allocate(self, count, keep=()):
        fresh = []
        for _ in range(count):
            if not self.blank:
                candidates = [
                    block
                    for block in self.tree()
                    if not block.holders and not block.children and block not in keep
                ]
                victim = min(candidates, key=lambda block: (self.priority(block), block.used))
                victim.parent.children.remove(victim)
                self.blank += 1
            self.blank -= 1
            fresh.append(Block())
        return fresh

    def let_go(self, holder, block):
        block.holders.remove(holder)
        if block.published is None:
            self.blank += not block.holders
            return
        block.used = self.tick()
        if not block.holders and block.since is None:
            block.since = self.now

    # -------------------------------------------------------------- retention

    def asked(self, seq, block):
        first = block * self.size
        if first < seq.prompt:
            for start, end, priority, duration in seq.ranges or ():
                if start <= first < (seq.prompt if end is None else end):
                    return priority, duration
        return None

    def wanted(self, seq, block):
        if block * self.size >= seq.prompt:
            return seq.decode or (35, None)
        return self.asked(seq, block) or seq.inherited.get(block) or (35, None)

    def retain(self, block, retention):
        if (block.priority, block.duration) != retention or block.since is not None:
            block.priority, block.duration = retention
            block.since = None

    # -------------------------------------------------------------- sequences

    def add(self, name, space, tokens, ranges=None, decode=None, most=None):
        plan = self.plan(space, tokens, most)
        if plan is None:
            raise Full
        path, source, shared, total = plan
        seq = self.seqs[name] = Seq(space, tokens, ranges, decode)
        for number, block in enumerate(path):
            block.holders.append(seq)
            asked = self.asked(seq, number)
            if asked:
                self.retain(block, asked)
        seq.blocks = list(path)
        if source:
            kept = (35, None) if self.ran_out(source) else (source.priority, source.duration)
            seq.inherited[len(path)] = kept
        if source and not self.copy:
            source.parent.children.remove(source)
            taken = Block()
            seq.blocks += [taken, *self.allocate(total - len(path) - 1)]
        else:
            seq.blocks += self.allocate(total - len(path), keep=[source])
            if source:
                self.copies += 1
                source.used = self.tick()
        for block in seq.blocks[len(path) :]:
            block.holders.append(seq)
        seq.matched = seq.computed = len(path) * self.size + shared
        return seq.matched

    def append(self, name, tokens):
        seq = self.seqs[name]
        need = -(-(len(seq.tokens) + len(tokens)) // self.size) - len(seq.blocks)
        if need > self.free():
            raise Full
        for block in self.allocate(need):
            block.holders.append(seq)
            seq.blocks.append(block)
        seq.tokens += tokens

    def publish(self, seq, number, node, tokens):
        block = seq.blocks[number]
        block.parent, block.tokens = node, tuple(tokens)
        block.published = self.tick()
        block.priority, block.duration = self.wanted(seq, number)
        block.since = None
        node.children.append(block)
        return block

    def first_private(self, seq):
        private = [n for n, block in enumerate(seq.blocks) if block.published is None]
        return private[0] if private else len(seq.blocks)

    def node(self, seq, number):
        return seq.blocks[number - 1] if number else self.root(seq.space)

    def commit(self, name, count):
        seq = self.seqs[name]
        if not 0 <= count <= len(seq.tokens):
            raise Wrong
        if count <= seq.computed:
            return
        seq.computed = count
        for number in range(self.first_private(seq), count // self.size):
            node, tokens = self.node(seq, number), self.piece(seq.tokens, number)
            if seq.duplicate is None and self.child(node, tokens):
                seq.duplicate = number
            if seq.duplicate is not None:
                return
            self.publish(seq, number, node, tokens)

    def rewind(self, name, count):
        seq = self.seqs[name]
        keep = len(seq.tokens) - count
        if count < 0 or keep < max(seq.computed, seq.matched):
            raise Wrong
        del seq.tokens[keep:]
        for block in reversed(seq.blocks[-(-keep // self.size) :]):
            self.let_go(seq, block)
        del seq.blocks[-(-keep // self.size) :]

    def release(self, name):
        self.end(self.seqs.pop(name), None)

    def abort(self, name, count):
        if not 0 <= count <= len(self.seqs[name].tokens):
            raise Wrong
        self.end(self.seqs.pop(name), count)

    def end(self, seq, count):
        count = len(seq.tokens) - 1 if count is None else count
        count = max(count, seq.computed // self.size * self.size)
        whole, tail = count // self.size, count % self.size
        first = self.first_private(seq)
        valid = seq.blocks[first : -(-count // self.size)]
        pinned = any(isinstance(h, Pin) for block in valid for h in block.holders)
        node, stopped = self.node(seq, first), False
        for number in range(first, whole):
            tokens = self.piece(seq.tokens, number)
            there = self.child(node, tokens)
            if pinned and (there or seq.duplicate is not None):
                stopped = True
                break
            node = there or self.publish(seq, number, node, tokens)
        if tail and self.partial and not stopped:
            tokens = tuple(seq.tokens[whole * self.size : count])
            if not any(child.tokens[:tail] == tokens for child in node.children):
                self.publish(seq, whole, node, tokens)
        for block in reversed(seq.blocks):
            self.let_go(seq, block)

    # -------------------------------------------------------------- pins

    def pin(self, name):
        pin = Pin(self.seqs[name].blocks)
        for block in pin.blocks:
            block.holders.append(pin)
        self.pins.append(pin)
        return pin

    def pin_path(self, space, tokens):
        node, found = self.root(space), []
        while (len(found) + 1) * self.size <= len(tokens):
            node = self.child(node, self.piece(tokens, len(found)))
            if node is None:
                break
            found.append(node)
        pin = Pin(found)
        for block in found:
            block.holders.append(pin)
        self.pins.append(pin)
        return pin

    def unpin(self, pin):
        if pin not in self.pins:
            raise Wrong
        self.pins.remove(pin)
        for block in reversed(pin.blocks):
            self.let_go(pin, block)

    def detach(self, name, first):
        seq = self.seqs[name]
        if not 0 <= first <= len(seq.blocks):
            raise Wrong
        old = seq.blocks[first:]
        if any(block.published is not None for block in old):
            raise Wrong
        if len(old) > self.free():
            raise Full
        fresh = self.allocate(len(old))
        pin = Pin(old)
        for block in old:
            block.holders.remove(seq)
            block.holders.append(pin)
        for block in fresh:
            block.holders.append(seq)
        seq.blocks[first:] = fresh
        seq.computed = min(seq.computed, first * self.size)
        seq.matched = min(seq.matched, first * self.size)
        if seq.duplicate is not None and seq.duplicate >= first:
            seq.duplicate = None
        self.pins.append(pin)
        return pin

    def reset(self):
        if self.seqs or self.pins:
            raise Wrong
        self.blank += len(self.tree())
        self.roots.clear()


SALTS = [None, "a", "b"]
PRIORITIES = [0, 20, 35, 35, 50, 90]
DURATIONS = [None, None, 1000, 3000]


def some_tokens(random, most):
    # Few tokens and short prompts: paths meet, branch and fill the pool all the time.
    return [random.randint(0, 1) for _ in range(random.randint(0, most))]


def some_retention(random):
    """Ranges (start, end, priority, milliseconds) that do not overlap, and a decode policy."""
    bounds = sorted(random.sample(range(15), random.randint(0, 4)))
    ranges = [
        (start, end, random.choice(PRIORITIES), random.choice(DURATIONS))
        for start, end in itertools.pairwise(bounds)
        if random.random() < 0.7
    ]
    return ranges, (random.choice(PRIORITIES), random.choice(DURATIONS))


def in_seconds(milliseconds):
    return None if milliseconds is None else milliseconds / 1000


class BlockManagerMachine(RuleBasedStateMachine):
    """Every call goes to both; results, errors, counts, shared ids and what matches must agree.

    Hypothesis chooses the seeds of the steps, and shrinks by leaving steps out.
    """

    def __init__(self):
        super().__init__()
        self.names = itertools.count()
        self.handles = []
        self.copies = 0
        self.probes = [([0], None)]

    @initialize(random=st.randoms(use_true_random=True))
    def start(self, random):
        size = random.choice([2, 2, 4])
        partial, copy = random.random() < 0.8, random.random() < 0.6
        self.naive = NaiveBlocks(size, random.randint(2, 16), partial=partial, copy=copy)
        config = KvCacheConfig(
            tokens_per_block=size, enable_partial_reuse=partial, copy_on_partial_reuse=copy
        )
        self.manager = BlockManager(
            config,
            KvCacheLayout(1, 1, 1, 1, size, torch.float32),
            num_blocks=self.naive.count,
            copier=self,
            clock=lambda: self.naive.now,
        )

    def copy_tokens(self, source, target, num_tokens):
        assert source != target
        self.copies += 1

    @rule(random=st.randoms(use_true_random=True))
    def step(self, random):
        steps = {self.add: 6, self.pin_keys: 1, self.advance: 1, self.reset: 1}
        if self.naive.seqs:
            steps |= {self.append: 3, self.commit: 5, self.release: 3, self.abort: 2}
            steps |= {self.rewind: 1, self.pin: 2, self.detach: 1}
        if self.handles:
            steps[self.unpin] = 1 + len(self.handles)
        call = random.choices(list(steps), list(steps.values()))[0]
        note(call.__name__)
        call(random)
        self.check()

    # -------------------------------------------------------------- what is compared

    def chain(self, tokens, salt):
        root = BlockKey(bytes([SALTS.index(salt)]) * 32)
        return KeyChain(root, self.naive.size, TokenBuffer(np.array(tokens, np.int32)))

    def both(self, naive_call, call):
        """The results of both, or ``None`` if both refuse in the same way."""
        try:
            expected = naive_call()
        except Full:
            with pytest.raises(OutOfBlocks):
                call()
            expected = got = None
        except Wrong:
            with pytest.raises((ConfigurationError, SequencesLive)):
                call()
            expected = got = None
        else:
            got = call()
        return expected, got

    def check(self):
        naive, manager = self.naive, self.manager
        manager.check_invariants()
        assert manager.num_free_blocks() == naive.free()
        assert self.copies == naive.copies
        ids = {}
        for name, seq in naive.seqs.items():
            self.bind(ids, seq.blocks, manager.block_ids(name))
            assert manager.priorities(name) == [
                naive.priority(block) if block.published is not None else naive.wanted(seq, n)[0]
                for n, block in enumerate(seq.blocks)
            ]
        for pin, handle in self.handles:
            self.bind(ids, pin.blocks, handle.block_ids)
        assert len(set(ids.values())) == len(ids), "different blocks have different ids"
        for tokens, salt in self.probes[-12:]:
            assert manager.match([*tokens, 9], cache_salt=salt) == naive.match(salt, [*tokens, 9])

    def bind(self, ids, blocks, found):
        assert len(blocks) == len(found)
        for block, number in zip(blocks, found, strict=True):
            assert ids.setdefault(block, number) == number, "one block has one id"

    # -------------------------------------------------------------- the calls

    def pick(self, random):
        return random.choice(list(self.naive.seqs))

    def add(self, random):
        tokens, salt = [random.randint(0, 1), *some_tokens(random, 8)], None
        if random.random() < 0.2:
            salt = random.choice(SALTS)
        if random.random() < 0.7:
            # Go on from something known, or repeat it.
            known, salt = random.choice(self.probes[-10:])
            keep = random.choice([len(known), random.randint(1, len(known))])
            tokens = (known[:keep] + some_tokens(random, 5))[:18]
        most = random.randint(0, 12) if random.random() < 0.15 else None
        ranges = decode = retention = None
        if random.random() < 0.4:
            given, policy = some_retention(random)
            ranges = [(a, b, p, in_seconds(ms)) for a, b, p, ms in given]
            decode = policy[0], in_seconds(policy[1])
            fields = ("token_start", "token_end", "priority", "duration_ms")
            retention = KvCacheRetentionConfig(
                token_range_retention_configs=[
                    dict(zip(fields, entry, strict=True)) for entry in given
                ],
                decode_retention_priority=policy[0],
                decode_duration_ms=policy[1],
            )
        fits = self.naive.can_add(salt, tokens, most)
        assert self.manager.can_add(tokens, cache_salt=salt, max_matched=most) == fits
        name = next(self.names)
        expected, got = self.both(
            lambda: self.naive.add(name, salt, tokens, ranges, decode, most),
            lambda: self.manager.add_sequence(
                name,
                tokens,
                cache_salt=salt,
                retention=retention,
                keys=self.chain(tokens, salt),
                max_matched=most,
            ),
        )
        assert (got is not None) == fits
        if got is not None:
            assert got.matched_tokens == expected
        self.probes.append((tokens, salt))

    def append(self, random):
        name, tokens = self.pick(random), some_tokens(random, 5)
        self.both(
            lambda: self.naive.append(name, tokens),
            lambda: self.manager.append_tokens(name, tokens),
        )
        seq = self.naive.seqs[name]
        if seq.tokens:
            self.probes.append((list(seq.tokens), seq.space))

    def commit(self, random):
        name = self.pick(random)
        most = len(self.naive.seqs[name].tokens)
        count = random.choice([most, most, random.randint(0, most + 1)])
        self.both(lambda: self.naive.commit(name, count), lambda: self.manager.commit(name, count))

    def rewind(self, random):
        name, count = self.pick(random), random.randint(0, 6)
        self.both(lambda: self.naive.rewind(name, count), lambda: self.manager.rewind(name, count))

    def release(self, random):
        name = self.pick(random)
        self.both(lambda: self.naive.release(name), lambda: self.manager.release(name))

    def abort(self, random):
        name = self.pick(random)
        count = random.randint(0, len(self.naive.seqs[name].tokens) + 1)
        self.both(lambda: self.naive.abort(name, count), lambda: self.manager.abort(name, count))

    def pin(self, random):
        name = self.pick(random)
        self.handles.append(self.both(lambda: self.naive.pin(name), lambda: self.manager.pin(name)))

    def pin_keys(self, random):
        tokens, salt = random.choice(self.probes[-10:])
        self.handles.append(
            self.both(
                lambda: self.naive.pin_path(salt, tokens),
                lambda: self.manager.pin_keys(self.chain(tokens, salt).keys()),
            )
        )

    def detach(self, random):
        name = self.pick(random)
        first = random.randint(0, len(self.naive.seqs[name].blocks) + 1)
        pair = self.both(
            lambda: self.naive.detach(name, first), lambda: self.manager.detach(name, first)
        )
        if pair[0] is not None:
            self.handles.append(pair)

    def unpin(self, random):
        pin, handle = self.handles.pop(random.randrange(len(self.handles)))
        self.both(lambda: self.naive.unpin(pin), lambda: self.manager.unpin(handle))
        with pytest.raises(ConfigurationError, match="handle"):
            self.manager.unpin(handle)

    def advance(self, random):
        self.naive.now += random.choice([0.5, 1.0, 2.5])

    def reset(self, random):
        self.both(self.naive.reset, self.manager.reset)


QUICK = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
BlockManagerMachine.TestCase.settings = QUICK
TestBlockManager = BlockManagerMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestBlockManagerLong(BlockManagerMachine.TestCase):
    settings = settings(QUICK, max_examples=2000)
