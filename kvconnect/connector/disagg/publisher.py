"""The prompts that a worker publishes: tokens readable after each step, and freed blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvconnect.connector.disagg.messages import EndOrder, PublishOrder
from kvconnect.connector.disagg.node import TransferNode
from kvconnect.connector.io.lookup import blocks_needed
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import count
from kvconnect.transfer.control.messages import NOTHING_COMPUTED, LeaseId, Watermark
from kvconnect.transfer.leases.lease import Blocks


@dataclass(slots=True, eq=False)
class _Shared:
    """A prompt that is published.

    Attributes:
        key: the key of its lease; ``None``: it was not granted, it ended, or no reader reads here.
        num_tokens: the number of tokens that are published.
        ids: the known block ids of each pool group; -1 where the request holds none.
        told: the number of leading blocks whose ids were sent to readers, by pool group.
        mark: the progress of the computation that was sent to readers.
    """

    key: LeaseId | None
    num_tokens: int
    ids: list[list[int]]
    told: list[int]
    mark: Watermark = NOTHING_COMPUTED


class Publisher:
    """Publishes prompts as they are computed. `node` calls some methods on other threads.

    Readers receive the message that the blocks are kept only after the request has ended. A reader
    that has read everything by then has valid blocks, even if this process dies before its last
    message. Until then a preemption frees the blocks and breaks the lease.

    Args:
        node: the node of this process.
        layouts: the layouts of the pool groups.
        is_read: true if readers read from this rank; otherwise no prompt is published.
    """

    def __init__(
        self, node: TransferNode, layouts: Sequence[KvCacheLayout], *, is_read: bool = True
    ) -> None:
        self._node = node
        self._is_read = is_read
        self._layouts = layouts
        self._num_layers = 1 + max(layout.layer_numbers[-1] for layout in layouts)
        self._shared: dict[int, _Shared] = {}
        self._computing: list[tuple[_Shared, int]] = []  # in this step, up to which token

    def begin_step(self, orders: Sequence[PublishOrder]) -> None:
        """Receives the orders of a step, and publishes the tokens that were valid before it."""
        self._computing.clear()
        for order in orders:
            shared = self._begin(order) if order.begins else self._shared.get(order.request_id)
            if shared is None or shared.key is None:
                continue
            self._learn(shared, order)
            self._node.device.after(partial(self._advance, shared, order.valid, self._num_layers))
            if order.computed > order.valid:
                self._computing.append((shared, order.computed))

    def _begin(self, order: PublishOrder) -> _Shared:
        self.revoke(order.request_id)
        nbytes = sum(
            len(blocks_needed(layout.window, order.num_tokens, layout.tokens_per_block))
            * layout.block_nbytes
            for layout in self._layouts
        )
        key = None
        if self._is_read:
            key = self._node.offers.offer(order.name, tokens=order.num_tokens, nbytes=nbytes)
        groups = len(self._layouts)
        shared = _Shared(key, order.num_tokens, [[] for _ in range(groups)], [0] * groups)
        self._shared[order.request_id] = shared
        return shared

    @staticmethod
    def _learn(shared: _Shared, order: PublishOrder) -> None:
        for ids, first, new in zip(shared.ids, order.first_blocks, order.blocks, strict=True):
            ids[first:] = new

    def layer_computed(self, layer: int) -> None:
        """Publishes layer `layer` of this step's tokens once the device has written it."""
        for shared, tokens in self._computing:
            self._node.device.after(partial(self._advance, shared, tokens, layer + 1))

    def step_computed(self) -> None:
        """Adds prompts that this forward pass completes to the counter ``transfer.computed``."""
        for shared, tokens in self._computing:
            if tokens >= shared.num_tokens:
                told = partial(count, "transfer.computed", tokens=shared.num_tokens)
                self._node.device.after(told)

    def end(self, order: EndOrder) -> None:
        """Ends the publication of a prompt whose request ended and whose blocks are still kept.

        If all tokens are valid, the whole prompt is published once the device has computed it.
        Otherwise its lease ends.
        """
        shared = self._shared.pop(order.request_id, None)
        key = None if shared is None else shared.key
        if shared is None or key is None:
            self._node.offers.end(order.request_id, None)
        elif order.num_tokens < shared.num_tokens:
            self._node.offers.withdraw(key)
            self._node.offers.end(order.request_id, None)
        else:
            # Before readers receive it: one may release the lease at once.
            self._node.offers.end(order.request_id, key)
            self._node.device.after(partial(self._keep, shared, key))

    def _keep(self, shared: _Shared, key: LeaseId) -> None:
        # An earlier call may have found the lease ended and cleared the key; `advance` needs it.
        shared.key = key
        if not self._node.offers.server.table.is_claimed(key):  # else most of it was read already
            self._node.keep_digests(key.epoch, self._whole_blocks(shared))
        self._advance(shared, shared.num_tokens, self._num_layers, kept=True)

    def _whole_blocks(self, shared: _Shared) -> list[list[int]]:
        """Returns the ids of blocks, by pool group, that the prompt fills and readers need.

        The owner of a block may write behind the last token of a prompt, so a last block that the
        prompt does not fill is left out.
        """
        found = []
        for ids, layout in zip(shared.ids, self._layouts, strict=True):
            size = layout.tokens_per_block
            first = blocks_needed(layout.window, shared.num_tokens, size).start
            whole = ids[first : shared.num_tokens // size]
            found.append([one for one in whole if one >= 0])
        return found

    def revoke(self, request_id: int) -> None:
        """Withdraws a prompt whose blocks are freed: data read from it is invalid."""
        shared = self._shared.pop(request_id, None)
        if shared is not None and shared.key is not None:
            self._node.offers.withdraw(shared.key)

    def take_ended(self) -> list[int]:
        """Returns requests that ended and whose blocks no reader needs any more."""
        return self._node.offers.take_ended() if self._node.hands_out else []

    def shutdown(self) -> None:
        """Withdraws every prompt."""
        for request_id in list(self._shared):
            self.revoke(request_id)

    def _advance(self, shared: _Shared, tokens: int, layers: int, *, kept: bool = False) -> None:
        """Publishes that the first `layers` layers hold the first `tokens` tokens.

        Runs on the device's thread, too.
        """
        if shared.key is None or tokens == 0:
            return
        known = shared.mark
        before = known.tokens if tokens > known.tokens else known.before
        mark = Watermark(layers=layers, tokens=tokens, before=before, kept=kept)
        if known < mark:
            shared.mark = mark
            if not self._node.offers.advance(shared.key, mark, self._untold(shared, tokens)):
                shared.key = None

    def _untold(self, shared: _Shared, tokens: int) -> Blocks:
        """Returns the ids of blocks that readers need and have not received, by pool group."""
        found = []
        for group, layout in enumerate(self._layouts):
            needed = blocks_needed(layout.window, shared.num_tokens, layout.tokens_per_block)
            first = max(needed.start, shared.told[group])
            ids = shared.ids[group][first : needed.stop]
            # A window's blocks stay for sure only once its last tokens are computed.
            if layout.window is not None and tokens < shared.num_tokens:
                ids = []
            if -1 in ids:
                ids = ids[: ids.index(-1)]
            if ids:
                shared.told[group] = first + len(ids)
            found.append(tuple(ids))
        return tuple(found) if any(found) else ()
