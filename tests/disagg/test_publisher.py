"""What is handed out, as a device that computes behind its engine has it told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvconnect.connector.disagg.messages import EndOrder, PublishOrder
from kvconnect.connector.disagg.publisher import Publisher
from kvconnect.layout import KvCacheLayout
from kvconnect.transfer.control.messages import LeaseId

LAYOUT = KvCacheLayout(2, 1, 4, 4, 16, torch.float32)
WINDOWED = KvCacheLayout(2, 1, 4, 4, 16, torch.float32, window=4)
KEY = LeaseId(request="name", epoch=1)
ORDER = PublishOrder(
    request_id=1,
    name="name",
    begins=True,
    num_tokens=20,
    first_blocks=(0,),
    blocks=([3, 4],),
    valid=16,
    computed=20,
)


class OneOffer:
    """One offer, whose lease has or has not ended when more of it is computed."""

    def __init__(self, *, lives, claimed):
        self.advanced, self.kept = [], []
        self.lives, self.claimed = lives, claimed

    def offer(self, name, *, tokens, nbytes):
        return KEY

    def advance(self, key, mark, blocks):
        self.advanced.append(key)
        return self.lives

    def end(self, request_id, key):
        self.kept.append(key)

    @property
    def server(self):
        return SimpleNamespace(table=SimpleNamespace(is_claimed=lambda key: self.claimed))


def test_a_lease_that_ended_before_the_device_was_done_is_let_go_of():
    """The engine knew it as alive and kept the blocks for it: nothing else gives them back."""
    later, offers = [], OneOffer(lives=False, claimed=True)
    node = SimpleNamespace(device=SimpleNamespace(after=later.append), offers=offers)
    publisher = Publisher(node, (LAYOUT,))
    publisher.begin_step([ORDER])
    publisher.end(EndOrder(1, 20))
    assert offers.kept == [KEY]
    for call in later:
        call()
    assert offers.advanced == [KEY, KEY]


@pytest.mark.parametrize(
    ("claimed", "layout", "digested"),
    [
        (True, LAYOUT, []),
        (False, LAYOUT, [(1, [[3]])]),
        (False, WINDOWED, [(1, [[]])]),
    ],
    ids=["read meanwhile", "not read yet", "a window has passed the whole blocks"],
)
def test_whole_blocks_of_a_prompt_that_waits_for_its_reader_are_digested(claimed, layout, digested):
    """The last block is not: its owner may write behind the last token."""
    found = []
    node = SimpleNamespace(
        device=SimpleNamespace(after=lambda call: call()),
        offers=OneOffer(lives=True, claimed=claimed),
        keep_digests=lambda *told: found.append(told),
    )
    publisher = Publisher(node, (layout,))
    publisher.begin_step([ORDER])
    assert not found
    publisher.end(EndOrder(1, 20))
    assert found == digested
