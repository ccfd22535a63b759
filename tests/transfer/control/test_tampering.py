"""A channel between two sides on whose way one frame is changed, repeated, left out or swapped.

Each side is delivered what the other said, in order, from the beginning and without a gap; or the
channel ends, and soon.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from endpoints import SHORT, Side, until
from tampering import TO_CLIENT, TO_SERVER, Relay, Tampering

from kvconnect.transfer.control.endpoint import Connected, Disconnected
from kvconnect.transfer.control.keyed import FindKeys, FoundKeys
from kvconnect.transfer.control.listener import Listener
from kvconnect.transfer.control.messages import (
    Claim,
    Grant,
    LeaseId,
    Renew,
    Watermark,
    WatermarkOf,
)
from kvconnect.transfer.control.peer import Peer
from kvconnect.transfer.secret import SharedSecret

SECRET = SharedSecret("correct horse battery staple")
KEY = bytes(range(32))
MARK = Watermark(layers=2, tokens=31, before=16)
BLOCKS = ((3, 1, 4, 15), (9, 2))

ASKED = (
    Claim(seq=1, request="r", epoch=7),
    Renew(seq=2, leases=(LeaseId(request="r", epoch=7),)),
    FindKeys(seq=4, keys=(KEY,)),
)
ANSWERED = (
    Grant(seq=1, request="r", epoch=7, lease_s=2.0, tokens=64, blocks=BLOCKS, watermark=MARK),
    WatermarkOf(request="r", epoch=7, watermark=MARK, first=(4, 2), blocks=((5,), (6,))),
    FoundKeys(seq=4, found=b"\1"),
)


class Speaker(Side):
    """Says all its words on each channel, and checks what it hears.

    Attributes:
        wrong: what it was delivered that was not said; empty: nothing.
        heard_all: the open channels that delivered everything.
    """

    def __init__(self, engine_id, words, secret):
        super().__init__(engine_id, secret=secret, deliver=self._hear, timing=SHORT)
        self.words = words
        self.other: Speaker | None = None
        self.wrong: list = []
        self.heard_all: set = set()
        self._left: dict = {}

    def _hear(self, channel, event):
        if isinstance(event, Connected):
            if event.hello != self.other.hello:
                self.wrong.append(event)
            self._left[channel] = list(self.other.words)
            for each in self.words:
                channel.send(each)
        elif isinstance(event, Disconnected):
            self.heard_all.discard(channel)
        else:
            left = self._left[channel]
            if not left or event != left.pop(0):
                self.wrong.append(event)
            if not left:
                self.heard_all.add(channel)


def converse(change, secret):
    """Both say everything on each connection, until both have heard it behind the change."""
    p, d = Speaker("P", ANSWERED, secret), Speaker("D", ASKED, secret)
    p.other, d.other = d, p
    with (
        Listener(p.endpoint) as listening,
        Relay(listening.port, change) as relay,
        Peer(d.endpoint, "127.0.0.1", relay.port) as peer,
    ):
        assert change.done.wait(60)
        # A changed frame of the conversation's end is found by the next heartbeat.
        until(lambda: p.wrong or d.wrong or peer.attempts > 1)
        until(lambda: p.wrong or d.wrong or (p.heard_all and d.heard_all))
    return p.wrong + d.wrong


# Of a conversation without a secret: the opening and Hello; with one, the proof between them.
FRAMES = {
    (way, number)
    for way, said in ((TO_SERVER, ASKED), (TO_CLIENT, ANSWERED))
    for number in range(2 + len(said))
}


@pytest.mark.parametrize("secret", [None, SECRET], ids=["no secret", "secret"])
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("flip", marks=pytest.mark.planted("bit-in-control", "transfer", "refused")),
        pytest.param(
            "repeat", marks=pytest.mark.planted("replayed-control", "transfer", "refused")
        ),
        pytest.param("drop", marks=pytest.mark.planted("replayed-control", "transfer", "refused")),
        pytest.param("swap", marks=pytest.mark.planted("replayed-control", "transfer", "refused")),
    ],
)
def test_no_side_hears_what_the_other_did_not_say(how, secret):
    def wrong(place):
        way, number = place
        return converse(Tampering(how, way, number + (secret is not None), seed=number), secret)

    places = sorted(FRAMES)
    with ThreadPoolExecutor(8) as pool:  # each conversation mostly waits
        assert dict(zip(places, pool.map(wrong, places), strict=True)) == {
            each: [] for each in places
        }
