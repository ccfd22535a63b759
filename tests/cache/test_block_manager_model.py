"""The block manager against a naive model of its specification, op by op."""

from __future__ import annotations

import pytest
from block_manager_machine import BlockManagerMachine
from hypothesis import HealthCheck, Phase, settings
from naive_manager import NaiveManager

from kvconnect.errors import ConfigurationError


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
        return Twin(config, primary, host, clock=lambda: self.now, copier=self.content)

    def check_events(self):
        pass

    def pin_path(self, tokens, salt):
        return self.manager.pin_path(tokens, salt)


QUICK = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Explaining a failure runs every step under a tracer: that outlasts any patience.
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


@pytest.mark.timeout(600)  # a failure is shrunk first
class TestBlockManager(BlockManagerMachine.TestCase):
    settings = QUICK


class TestNaiveModel(NaiveMachine.TestCase):
    settings = settings(QUICK, max_examples=20)


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestBlockManagerLong(BlockManagerMachine.TestCase):
    settings = settings(QUICK, max_examples=2000)
