"""What is handed out, as a device that computes behind its engine has it told."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvconnect.connector.data import RequestData, SchedulerOutput
from kvconnect.connector.disagg.messages import EndOrder, PublishOrder
from kvconnect.connector.disagg.params import transfer_name
from kvconnect.connector.disagg.pools import check_pools
from kvconnect.connector.disagg.prefill import PrefillBook
from kvconnect.connector.disagg.publisher import Publisher
from kvconnect.errors import ConfigurationError
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.request import LlmRequest
from kvconnect.transfer.control.description import PoolInfo
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
        self.advanced, self.kept, self.told = [], [], []
        self.lives, self.claimed = lives, claimed

    def offer(self, name, *, tokens, nbytes):
        return KEY

    def advance(self, key, mark, blocks):
        self.advanced.append(key)
        self.told.append(blocks)
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


def test_a_window_s_blocks_are_told_once_its_last_tokens_are_computed():
    """Those before it are freed while the prompt is computed, and filled by others."""
    offers = OneOffer(lives=True, claimed=True)
    node = SimpleNamespace(device=SimpleNamespace(after=lambda call: call()), offers=offers)
    publisher = Publisher(node, (WINDOWED,))
    publisher.begin_step([replace(ORDER, computed=16)])
    assert offers.told == [()]
    publisher.begin_step([replace(ORDER, begins=False, first_blocks=(2,), blocks=([],), valid=20)])
    assert offers.told == [(), ((4,),)]


def test_what_is_computed_behind_a_load_of_the_same_step_is_not_published():
    """It is right only if the load succeeds, which the next step tells."""
    node = SimpleNamespace(layouts=(LAYOUT,), config=SimpleNamespace(role="prefill"), engine_id="p")
    book = PrefillBook(node, SimpleNamespace(model_digest=b"m" * 32, tokens_per_block=16))
    request = LlmRequest(
        1,
        np.arange(41, dtype=np.int32),
        chain_root=BlockKey(bytes(32)),
        tokens_per_block=16,
        kv_transfer_params={"do": "prefill", "transfer_id": "x"},
    )
    book.begin(request)
    data = RequestData(1, request.get_tokens(0), [5, 6, 7], 16, 25)
    request.num_external_tokens = 16
    (order,) = book.orders(SchedulerOutput(new_requests=[data]))
    assert (order.valid, order.computed) == (16, 0)
    request.num_external_tokens = 0
    (order,) = book.orders(SchedulerOutput(new_requests=[data]))
    assert (order.valid, order.computed) == (16, 40)


def test_a_prompt_of_another_model_has_another_name():
    root = BlockKey(bytes(32))
    tokens = np.arange(9, dtype=np.int32)
    request = LlmRequest(1, tokens, chain_root=root, tokens_per_block=16)
    names = {transfer_name("x", request, 8, bytes([model]) * 32) for model in range(2)}
    assert len(names) == 2


@pytest.mark.parametrize("field", ["dtype", "window", "key_dim", "num_layers"])
def test_a_peer_whose_blocks_have_another_layout_is_refused(field):
    other = {"dtype": torch.float64, "window": 4, "key_dim": 8, "num_layers": 3}[field]
    theirs = replace(LAYOUT, **{field: other})
    ours, peer = (
        SimpleNamespace(pools=[PoolInfo.of(0, 8, one)], rank=0, tp_size=1)
        for one in (LAYOUT, theirs)
    )
    check_pools(ours, ours, ())
    with pytest.raises(ConfigurationError, match="of another layout"):
        check_pools(ours, peer, ())
