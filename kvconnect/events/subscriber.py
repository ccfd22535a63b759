"""Follows the events of one publisher, and fills gaps by replay."""

from __future__ import annotations

import asyncio

import msgspec
import zmq
import zmq.asyncio

from kvconnect.events.format import END_OF_REPLAY, Batch, batch_number, number_frame
from kvconnect.events.held import HeldBlocks
from kvconnect.trace import count, warn_once

_REPLAY_S = 5.0
"""The seconds to wait for each message of a replay."""


class Followed:
    """The state of one publisher's sequence of batches, and the resulting blocks.

    Attributes:
        held: the blocks; cleared if batches are lost.
        next: the number of the next batch.
    """

    def __init__(self, held: HeldBlocks) -> None:
        self.held = held
        self.next = 0
        self._last_ts = float("-inf")
        self._decoder = msgspec.msgpack.Decoder(Batch)

    def take(self, number: int, payload: bytes, *, replayed: bool = False) -> bool:
        """Applies a batch; returns False if the batches from `next` on must be replayed first.

        A number that starts again belongs to a new publisher, whose cache was empty at its start. A
        replayed batch is always applied: batches missing before it are no longer kept. Its server
        may have dropped blocks in those, so all blocks are removed first.

        Raises:
            msgspec.MsgspecError: `payload` is not in the format.
        """
        batch = self._decoder.decode(payload)
        if number < self.next:
            if batch.ts <= self._last_ts:
                return True  # received in a replay already
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
    """Applies the publisher's events to `held` until cancelled; begins with a replay.

    Broken connections are restored automatically. Messages that are not in the format are counted
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
