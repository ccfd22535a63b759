"""Several stores as one against a dict: whatever happens to the tiers, never a wrong byte."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tier_store import DictTier

from kvconnect import frame
from kvconnect.backend import StoredBlock
from kvconnect.backends import open_backend
from kvconnect.backends.guard import breaker
from kvconnect.backends.guard.breaker import BreakerState
from kvconnect.backends.tiered import tier as tiered_tier
from kvconnect.backends.tiered.settings import TieredSettings
from kvconnect.backends.tiered.store import TieredBackend
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

LAYOUT = KvCacheLayout(1, 1, 8, 8, 2, torch.float32)
NBYTES = frame.frame_nbytes(LAYOUT.block_nbytes)
KEYS = [BlockKey(hashlib.blake2b(b"%d" % n, digest_size=32).digest()) for n in range(8)]
RUNS = st.tuples(st.integers(0, 7), st.integers(1, 8)).map(lambda run: KEYS[run[0] :][: run[1]])
TIERS = st.integers(0, 2)


def content(key: BlockKey) -> torch.Tensor:
    return torch.frombuffer(bytearray(key * 8), dtype=torch.uint8)[: LAYOUT.block_nbytes]


class Tiers(RuleBasedStateMachine):
    """Three tiers: the first is small, the last is written behind."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.tiers = [DictTier(variable_length=True) for _ in range(3)]
        self.tiers[0].room = 3
        self.dirty = False  # a tier failed, or lost something: what is there is not certain
        self.certain: set[BlockKey] = set()
        chosen = TieredSettings(
            write=("through", "through", "behind"), patience_s=60.0, queue_nbytes=4 * NBYTES
        )
        self.store = open_backend(TieredBackend(self.tiers, chosen))
        self.do(self.store.open([LAYOUT]))

    def do(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    @staticmethod
    async def answered(guards):
        while any(guard._calls.state != BreakerState.CLOSED for guard in guards):  # noqa: ASYNC110
            await asyncio.sleep(0)

    def teardown(self):
        for tier in self.tiers:
            tier.recover()
        self.do(self.store.close())
        left = asyncio.all_tasks(self.loop)
        assert not left
        self.loop.close()

    def present(self, keys):
        have = set().union(*(tier.keys() for tier in self.tiers if not tier.down))
        return next((at for at, key in enumerate(keys) if key not in have), len(keys))

    @rule(keys=RUNS)
    def save(self, keys):
        blocks = []
        for key in keys:
            data = torch.zeros(NBYTES, dtype=torch.uint8)
            frame.payload(data, LAYOUT.block_nbytes).copy_(content(key))
            blocks.append(StoredBlock(key, data))
        saved = self.do(self.store.save(blocks))
        assert 0 <= saved <= len(keys)
        if not self.tiers[1].down:
            assert saved == len(keys)
            self.certain.update(keys)
        for block in blocks:
            block.data.fill_(0xEE)  # handed on

    @rule(keys=RUNS)
    def look_up(self, keys):
        assert self.do(self.store.lookup(keys)) == self.present(keys)

    @rule(keys=RUNS)
    def load(self, keys):
        present = self.present(keys)
        into = [torch.full((NBYTES,), 0xC5, dtype=torch.uint8) for _ in keys]
        loaded = self.do(self.store.load(keys, into))
        assert loaded <= present
        for key, data in zip(keys[:loaded], into, strict=False):
            assert torch.equal(frame.payload(data, LAYOUT.block_nbytes), content(key))
        if not self.dirty:
            assert loaded == present

    @rule(keys=RUNS)
    def delete(self, keys):
        try:
            self.do(self.store.delete(keys))
        except BackendUnavailable:
            assert all(tier.down for tier in self.tiers)
            self.do(self.answered([self.store]))  # after several it is left alone for a moment
        self.certain.difference_update(keys)
        for tier in self.tiers:
            if not tier.down:
                assert not tier.keys() & set(keys)

    @rule(number=TIERS, key=st.sampled_from(KEYS))
    def lose(self, number, key):
        self.tiers[number].blocks.pop(key, None)
        self.certain.discard(key)

    @rule(number=TIERS, key=st.sampled_from(KEYS), at=st.integers(0, NBYTES - 1))
    def damage(self, number, key, at):
        block = self.tiers[number].blocks.get(key)
        if block is not None:
            data = block.data.clone()
            data[at] ^= 0x10
            self.tiers[number].blocks[key] = replace(block, data=data)
            self.dirty = True
            self.certain.discard(key)

    @rule(number=TIERS)
    def fail(self, number):
        self.tiers[number].down = True

    @rule()
    def recover(self):
        for tier in self.tiers:
            tier.recover()
        self.do(self.answered([tier.guard for tier in self.store.inner.tiers]))

        async def paid():
            # What a tier that failed was to delete it deletes when it answers: see `present`.
            while any(tier._owed for tier in self.store.inner.tiers):  # noqa: ASYNC110
                await asyncio.sleep(0)

        self.do(paid())

    @rule()
    def let_background_work(self):
        async def idle():
            tiers = self.store.inner.tiers
            while any(len(tier.backlog) for tier in tiers):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0)

        self.do(idle())

    @precondition(lambda self: not any(tier.down for tier in self.tiers))
    @invariant()
    def what_was_stored_and_not_lost_is_there(self):
        for key in self.certain:
            assert self.do(self.store.lookup([key])) == 1

    @invariant()
    def background_memory_is_bounded(self):
        for tier in self.store.inner.tiers:
            assert tier.backlog.nbytes <= 4 * NBYTES


@pytest.fixture(autouse=True, scope="module")
def _quick_probes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiered_tier, "_FIRST_PAUSE_S", 0.0)
        patch.setattr(tiered_tier, "_LONGEST_PAUSE_S", 0.0)
        patch.setattr(breaker, "_FIRST_PAUSE_S", 0.001)
        patch.setattr(breaker, "_LAST_PAUSE_S", 0.001)
        yield


TestTiers = Tiers.TestCase
TestTiers.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
