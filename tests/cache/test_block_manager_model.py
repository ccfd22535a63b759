"""The block manager against a naive model of its specification, op by op."""

from __future__ import annotations

import pytest
import torch
from block_manager_machine import BlockManagerMachine
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from naive_manager import NaiveManager
from slot_content import SlotContent

from kvconnect.cache.block_manager import BlockManager
from kvconnect.config import KvCacheConfig, KvCacheRetentionConfig
from kvconnect.errors import ConfigurationError
from kvconnect.layout import KvCacheLayout


class Twin(NaiveManager):
    """The naive model in the place of the real one."""

    def hold(self, blocks):
        pin = super().hold(blocks)
        first = blocks[self.pools[0]]
        pin.block_ids = [-1 if block.primary is None else block.primary for block in first]
        return pin

    def unpin(self, pin):
        if pin not in self.pins:
            raise ConfigurationError("handle")
        super().unpin(pin)

    def priorities(self, request_id):
        seq, pool = self.sequence(request_id), self.pools[0]
        return [
            pool.priority(block)
            if block and block.node
            else (seq.asked(pool, number, self.size) or (35, None))[0]
            for number, block in enumerate(seq.blocks[pool])
        ]


class NaiveMachine(BlockManagerMachine):
    """The naive model against itself: its own orders, too, must keep every content."""

    def make(self, config, primary, host):
        return Twin(
            config,
            primary,
            host,
            clock=lambda: self.now,
            copier=self.content,
            states=self.states,
        )

    def check_events(self):
        pass

    def pin_path(self, tokens, salt):
        return self.manager.pin_path(tokens, salt)


class StatesMachine(BlockManagerMachine):
    """One pool holds snapshots of recurrent states."""

    states = True


class NaiveStatesMachine(NaiveMachine):
    states = True


QUICK = settings(
    max_examples=45,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Explaining a failure runs every step under a tracer: that outlasts any patience.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


@pytest.mark.timeout(600)  # a failure is shrunk first
class TestBlockManager(BlockManagerMachine.TestCase):
    settings = QUICK


@pytest.mark.timeout(600)
class TestStates(StatesMachine.TestCase):
    settings = QUICK


class TestNaiveStates(NaiveStatesMachine.TestCase):
    settings = settings(QUICK, max_examples=8)


class TestNaiveModel(NaiveMachine.TestCase):
    settings = settings(QUICK, max_examples=8)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestStatesLong(StatesMachine.TestCase):
    settings = settings(QUICK, max_examples=2000)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestBlockManagerLong(BlockManagerMachine.TestCase):
    settings = settings(QUICK, max_examples=2000)


@settings(QUICK, max_examples=80)
@given(random=st.randoms(use_true_random=True))
def test_conversations_by_turns_come_back_in_long_runs(random):
    config = KvCacheConfig(
        tokens_per_block=2, secondary_offload_min_priority=random.choice([0, 35])
    )
    windows = random.choice([[None], [None], [None, 9], [9]])
    primary = dict.fromkeys(windows, random.randint(12, 20))
    host = dict.fromkeys(windows, random.randint(6, 24))
    content, expected = SlotContent(2), SlotContent(2)
    layouts = [KvCacheLayout(1, 1, 1, 1, 2, torch.float32, window) for window in windows]
    real = BlockManager(
        config, layouts, num_blocks=primary, num_host_blocks=host, copier=content, clock=float
    )
    naive = NaiveManager(config, primary, host, clock=float, copier=expected)
    conversations = [[name] * random.randint(4, 20) for name in range(random.randint(2, 4))]
    for turn in range(20):
        tokens = random.choice(conversations)
        tokens += [random.randint(0, 9)] * random.randint(0, 6)
        del tokens[24:]
        kept = KvCacheRetentionConfig(
            token_range_retention_configs=[
                {"token_start": 0, "priority": random.choice([20, 35, 35, 80])}
            ]
        )
        allocated = real.add_sequence(turn, tokens, retention=kept)
        matched = naive.add_sequence(turn, tokens, retention=kept).matched_tokens
        assert allocated.matched_tokens == matched
        held = [list(real.block_ids(turn, window=window)) for window in windows]
        for group, ids in enumerate(held):
            content.check(group, ids, None, tokens, matched)
            content.write(group, ids, None, tokens, matched, len(tokens))
        for manager in (real, naive):
            manager.commit(turn, len(tokens))
            manager.check_invariants()
            manager.release(turn)
        for group in range(len(windows)):
            assert content.orders["onboard", group] == expected.orders["onboard", group]
