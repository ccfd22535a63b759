"""What is handed out, as a device that computes behind its engine has it told."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from kvconnect.connector.disagg.messages import EndOrder, PublishOrder
from kvconnect.connector.disagg.publisher import Publisher
from kvconnect.layout import KvCacheLayout
from kvconnect.transfer.control.messages import LeaseId

LAYOUT = KvCacheLayout(2, 1, 4, 4, 16, torch.float32)
KEY = LeaseId(request="name", epoch=1)


class EndedOffers:
    """One offer, whose lease has ended when more of it is computed."""

    def __init__(self):
        self.advanced, self.kept = [], []

    def offer(self, name, *, tokens, nbytes):
        return KEY

    def advance(self, key, mark, blocks):
        self.advanced.append(key)
        return False

    def end(self, request_id, key):
        self.kept.append(key)


def test_a_lease_that_ended_before_the_device_was_done_is_let_go_of():
    """The engine knew it as alive and kept the blocks for it: nothing else gives them back."""
    later, offers = [], EndedOffers()
    node = SimpleNamespace(device=SimpleNamespace(after=later.append), offers=offers)
    publisher = Publisher(node, (LAYOUT,))
    order = PublishOrder(
        request_id=1,
        name="name",
        begins=True,
        num_tokens=20,
        first_blocks=(0,),
        blocks=([3, 4],),
        valid=16,
        computed=20,
    )
    publisher.begin_step([order])
    publisher.end(EndOrder(1, 20))
    assert offers.kept == [KEY]
    for call in later:
        call()
    assert offers.advanced == [KEY, KEY]
