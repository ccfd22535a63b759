"""Follows the events of one publisher, and fills gaps by replay."""

from __future__ import annotations

import asyncio

import msgspec
import zmq
import zmq.asyncio

from kvconnect.events.format import END_OF_REPLAY, Batch, batch_number, number_frame
from kvconnect.events.held import HeldBlocks
from kvconnect.trace import count, warn_once

__all__ = ["Followed", "follow"]

_REPLAY_S = 5.0
"""The time for each message of a replay."""


class Followed:
    """The state of one publisher's sequence of batches, and the blocks it leads to.

    Attributes:
        held: the blocks; cleared where batches are missed for good.
        next: the number of the batch that comes next.
    """

    def __init__(self, held: HeldBlocks) -> None:
        self.held = held
        self.next = 0
        self._last_ts = float("-inf")
        self._decoder = msgspec.msgpack.Decoder(Batch)

    def take(self, number: int, payload: bytes, *, replayed: bool = False) -> bool:
        """Applies a batch; False: those from `next` on must be replayed before it.

        A number that begins again is another publisher's, whose cache was empty at its start. A
        replayed batch is applied in any case: what is missing before it is no longer kept, and its
        server may have dropped blocks there, so all blocks are forgotten then.

        Raises:
            msgspec.MsgspecError: it is not in the format.
        """
        batch = self._decoder.decode(payload)
        if number < self.next:
            if batch.ts <= self._last_ts:
                return True  # came in a replay already
            self.next, self._last_ts = 0, float("-inf")
            self.held.clear()
        if number > self.next:
            if not replayed:
                return False
            self.held.clear()
        self.next, self._last_ts = number + 1, batch.ts
        self.held.apply(batch.events)
        return True


async def follow(endpoint: str, replay_endpoint: str, topic: str, held: HeldBlocks) -> None:
    """Keeps `held` as the publisher's events say, until cancelled; begins with a replay.

    Connections that break come back by themselves. Messages that are not in the format are counted
    and dropped.
    """
    context = zmq.asyncio.Context()
    followed = Followed(held)
    try:
        sub = context.socket(zmq.SUB)
        sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        sub.connect(endpoint)
        await _replay(context, replay_endpoint, followed)
        while True:
            frames = await sub.recv_multipart()
            if len(frames) != 3:
                count("events.bad_batch")
                continue
            number = batch_number(frames[1])
            if not _took(followed, number, frames[2], replayed=False):
                await _replay(context, replay_endpoint, followed)
                _took(followed, number, frames[2], replayed=True)
    finally:
        context.destroy(linger=0)


def _took(followed: Followed, number: int, payload: bytes, *, replayed: bool) -> bool:
    try:
        return followed.take(number, payload, replayed=replayed)
    except msgspec.MsgspecError as error:
        count("events.bad_batch")
        warn_once("events.bad_batch", f"a batch of events is not in the format: {error}")
        return True


async def _replay(context: zmq.asyncio.Context, endpoint: str, followed: Followed) -> None:
    """Applies the batches from the next one on, as far as the publisher keeps them."""
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        await socket.send_multipart((b"", number_frame(followed.next)))
        while True:
            frames = await asyncio.wait_for(socket.recv_multipart(), _REPLAY_S)
            if len(frames) != 4:
                count("events.bad_batch")
                return
            if frames[2] == END_OF_REPLAY:
                return
            _took(followed, batch_number(frames[2]), frames[3], replayed=True)
    except TimeoutError:
        count("events.no_replay")
    finally:
        socket.close()
