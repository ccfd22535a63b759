"""Pools that give each other slabs: nothing that is held or matched loses its content by that.

There is no model of which slab moves when. Checked is what must hold whatever moves.
"""

from __future__ import annotations

import itertools
import random as randoms

import pytest
import torch
from block_manager_machine import ROOTS, SALTS, some_config, some_retention, some_tokens
from slot_content import JUNK, SlotContent
from small_prompts import chain_of

from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.memory.sizing import PoolSizes, SlabGeometry
from kvconnect.errors import OutOfBlocks
from kvconnect.layout import KvCacheLayout

WINDOWS = [(None, 4), (None, 6, 3), (9, 2)]


class ArenaContent(SlotContent):
    """Slots of all groups lie in one arena: who writes to a slab destroys what others had there."""

    def __init__(self, tokens_per_block, blocks_per_slab):
        super().__init__(tokens_per_block)
        self.blocks_per_slab = blocks_per_slab
        self.writers = {}

    def touch(self, group, slots):
        for slab in {slot // self.blocks_per_slab[group] for slot in slots if slot >= 0}:
            if self.writers.setdefault(slab, group) != group:
                self.writers[slab] = group
                for other, slot in list(self.primary):
                    if other != group and slot // self.blocks_per_slab[other] == slab:
                        self.primary[other, slot] = [JUNK] * self.size

    def onboard(self, group, host_ids, ids):
        self.touch(group, ids)
        super().onboard(group, host_ids, ids)

    def move(self, group, sources, targets):
        assert {self.writers.get(s // self.blocks_per_slab[group], group) for s in sources} == {
            group
        }
        self.touch(group, targets)
        super().move(group, sources, targets)

    def copy_tokens(self, group, source, target, num_tokens, *, from_host=False):
        self.touch(group, [target])
        super().copy_tokens(group, source, target, num_tokens, from_host=from_host)

    def put(self, group, ids, position, name):
        self.touch(group, [ids[position // self.size]])
        super().put(group, ids, position, name)


class Live:
    """What its owner knows of a sequence."""

    def __init__(self, tokens, salt, computed):
        self.tokens, self.salt, self.computed = list(tokens), salt, computed


class Elastic:
    """A manager whose pools share an arena, and a random user of it."""

    def __init__(self, seed):
        self.random = random = randoms.Random(seed)
        config = some_config(random)
        self.size = config.tokens_per_block
        self.windows = random.choice(WINDOWS)
        per_slab = tuple(random.choice([1, 2, 3]) for _ in self.windows)
        owners = [group for group, _ in enumerate(self.windows)] * random.randint(2, 5)
        random.shuffle(owners)
        self.geometry = SlabGeometry(1 << 20, tuple(owners), per_slab)
        self.content = ArenaContent(self.size, per_slab)
        layouts = tuple(
            KvCacheLayout(1, 1, 1, 1, self.size, torch.float32, window) for window in self.windows
        )
        counts = tuple(owners.count(group) * per for group, per in enumerate(per_slab))
        host = tuple(random.choice([0, 0, 4, 12]) for _ in self.windows)
        self.manager = BlockManager(
            config,
            layouts,
            copier=self.content,
            clock=lambda: 0.0,
            sizes=PoolSizes(layouts, counts, host, self.geometry),
        )
        self.live, self.pins, self.names = {}, [], itertools.count()
        self.known = [([0], None)]

    def step(self):
        calls = {self.add: 4, self.make_room: 1}
        if self.live:
            count = len(self.live)
            calls |= {self.commit: 4, self.append: 2, self.end: 1 + count, self.pin: 0.5}
        if self.pins:
            calls[self.unpin] = len(self.pins)
        self.random.choices(list(calls), list(calls.values()))[0]()
        self.check()

    def ids(self, name, group):
        return list(self.manager.block_ids(name, window=self.windows[group]))

    def groups(self):
        return range(len(self.windows))

    def slabs(self):
        return [
            self.manager.max_blocks(window=window) / per
            for window, per in zip(self.windows, self.geometry.blocks_per_slab, strict=True)
        ]

    def check(self):
        self.manager.check_invariants()
        self.manager.take_events()
        assert sum(self.slabs()) == len(self.geometry.owners), "memory is neither made nor lost"
        for name, seq in self.live.items():
            for group in self.groups():
                ids = self.ids(name, group)
                self.content.check(group, ids, seq.salt, seq.tokens, seq.computed)
                self.content.scribble(group, ids, seq.computed)
        for kept in self.pins:
            for group, slot, offset, name in kept[1]:
                assert self.content.primary[group, slot][offset] == name

    def add(self):
        random = self.random
        tokens, salt = [random.randint(0, 1), *some_tokens(random, 12)], random.choice(SALTS)
        if random.random() < 0.7:
            known, salt = random.choice(self.known[-20:])
            tokens = (known[: random.randint(1, len(known))] + some_tokens(random, 8))[:30]
        given = {"cache_salt": salt}
        if random.random() < 0.3:
            given["first_chunk"] = random.randint(1, 10)
        fits, name = self.manager.can_add(tokens, **given), next(self.names)
        given["keys"] = chain_of(tokens, self.size, ROOTS[salt])
        if random.random() < 0.4:
            given["retention"] = some_retention(random)
        self.known.append((tokens, salt))
        if fits:
            added = self.manager.add_sequence(name, tokens, **given)
            self.live[name] = Live(tokens, salt, added.matched_tokens)
            return
        assert self.live or self.pins or len(tokens) > self.size, "one block of each always fits"
        before = self.slabs()
        with pytest.raises(OutOfBlocks):
            self.manager.add_sequence(name, tokens, **given)
        assert self.slabs() == before

    def make_room(self):
        needs = [self.random.choice([0, 0, 2, 5, 9]) for _ in self.windows]
        before = self.slabs()
        enough = self.manager.ensure_free(needs)
        free = [self.manager.num_free_blocks(window=window) for window in self.windows]
        if enough:
            assert all(have >= need for have, need in zip(free, needs, strict=True))
        else:
            assert self.slabs() == before
            assert any(have < need for have, need in zip(free, needs, strict=True))
            if not self.live and not self.pins:
                per_slab = self.geometry.blocks_per_slab
                slabs = sum(-(-n // per) for n, per in zip(needs, per_slab, strict=True))
                assert slabs > len(self.geometry.owners), "no slab is held back"

    def pick(self):
        return self.random.choice(list(self.live.items()))

    def reserved(self, name, stop):
        """Whether blocks for the first `stop` tokens could be had."""
        try:
            self.manager.reserve(name, stop)
        except OutOfBlocks:
            return False
        return True

    def compute(self, name, seq, stop):
        for group in self.groups():
            ids = self.ids(name, group)
            self.content.write(group, ids, seq.salt, seq.tokens, seq.computed, stop)

    def commit(self):
        name, seq = self.pick()
        stop = self.random.choice([len(seq.tokens), self.random.randint(0, len(seq.tokens))])
        if self.reserved(name, stop):
            self.compute(name, seq, stop)
            self.manager.commit(name, stop)
            seq.computed = max(seq.computed, stop)

    def append(self):
        name, seq = self.pick()
        more = some_tokens(self.random, 5)
        if not self.reserved(name, len(seq.tokens)):
            return
        try:
            self.manager.append_tokens(name, more)
        except OutOfBlocks:
            return
        seq.tokens += more
        self.known.append((list(seq.tokens), seq.salt))

    def end(self):
        name, seq = self.pick()
        if self.reserved(name, len(seq.tokens)) and self.random.random() < 0.8:
            self.compute(name, seq, len(seq.tokens) - 1)
            self.manager.release(name)
        else:
            self.manager.abort(name, seq.computed)
        del self.live[name]

    def pin(self):
        name, seq = self.pick()
        kept = [
            (group, ids[at // self.size], at % self.size, (seq.salt, tuple(seq.tokens[: at + 1])))
            for group in self.groups()
            for ids in [self.ids(name, group)]
            for at in range(seq.computed)
            if ids[at // self.size] >= 0
        ]
        self.pins.append((self.manager.pin(name), kept))

    def unpin(self):
        self.manager.unpin(self.pins.pop(self.random.randrange(len(self.pins)))[0])

    def finish(self):
        """Once nothing is held, any pool can have all the memory."""
        while self.live:
            self.end()
        while self.pins:
            self.unpin()
        for group in self.groups():
            needs = [0] * len(self.windows)
            needs[group] = len(self.geometry.owners) * self.geometry.blocks_per_slab[group]
            assert self.manager.ensure_free(needs)
            self.check()


def run(seed, num_steps=50):
    elastic = Elastic(seed)
    for _ in range(num_steps):
        elastic.step()
    elastic.finish()


@pytest.mark.parametrize("seed", range(20))
def test_contents_survive_moves_of_memory(seed):
    run(seed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_contents_survive_moves_of_memory_for_long():
    for seed in range(1000, 4000):
        run(seed)
