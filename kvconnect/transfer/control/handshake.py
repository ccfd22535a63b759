"""The opening of a connection: versions, the proof of the shared secret, `Hello` both ways.

::

    initiator                          acceptor
    opening: magic, version, nonce →                        fixed layout, for all versions to come
                                     ← opening
    Proof (with a secret)          →
                                     ← Proof                mutual: each over both openings
    Hello                          →
                                     ← Hello, or Error naming the field that differs

Every frame after the openings is sealed: first by a checksum over both openings, and by the secret
once both sides have proved it. Before the proof, an acceptor reads two small frames and stores
nothing of them. Without a secret the peer proves nothing, and the error does not name the field of
the model that differs.
"""

from __future__ import annotations

import secrets
import struct
import time
from contextlib import suppress
from typing import TypeVar

from kvconnect.errors import BadMessage, PeerRefused
from kvconnect.text import shown
from kvconnect.transfer.control.description import PROTOCOL, Compat
from kvconnect.transfer.control.endpoint import Endpoint
from kvconnect.transfer.control.messages import Error, Hello, Message, Proof, decode, encode
from kvconnect.transfer.control.wire import Wire, WireClosed, WireTimeout, frame
from kvconnect.transfer.seal import Seal
from kvconnect.transfer.secret import SharedSecret

M = TypeVar("M", bound=Message)

OPENING_LIMIT = 4096
"""The most bytes of a frame before the peer has proved that it knows the secret."""

# The largest field of `Hello`, `local`, may have half of that.
_HELLO_LIMIT = 2 << 20
_MAGIC = b"kvconnect-ctl\n\0\xff"
_OPENING = struct.Struct(f">{len(_MAGIC)}sHB32s")
_WITH_SECRET = 1
_OF_THE_MODEL = Compat.model_fields.keys() - {"block_format", "transport"}
_DIFFERS = (
    "the two sides have another model or another cache; the log of the side that refused says in "
    "what they differ (with a shared secret it is said here)"
)
_INITIATOR, _ACCEPTOR = b"kvconnect initiator", b"kvconnect acceptor"


def shake_hands(wire: Wire, endpoint: Endpoint, *, initiator: bool) -> Hello:
    """Opens `wire` as one of its two ends and returns the peer's `Hello`.

    Blocks for at most ``endpoint.timing.handshake_s``.

    Raises:
        PeerRefused: one side refuses the other; the message names the field that differs.
        BadMessage: the other side does not speak this protocol.
        WireClosed, WireTimeout: the connection ended, or the handshake took too long.
    """
    until = time.monotonic() + endpoint.timing.handshake_s
    try:
        return _Handshake(wire, endpoint, until, initiator=initiator).run()
    except PeerRefused as error:
        if not isinstance(error, _ByPeer):
            _say(wire, _refusal(error, known=endpoint.secret is not None))
        raise


def check_compat(ours: Compat, theirs: Compat) -> None:
    """Checks that blocks of both sides mean the same.

    Raises:
        PeerRefused: a field differs; the message names the first one and both values.
    """
    for name in Compat.model_fields:
        here, there = getattr(ours, name), getattr(theirs, name)
        if here != there:
            raise PeerRefused(name, f"{shown(here)} here, {shown(there)} at the peer")


class _ByPeer(PeerRefused):
    """The error of a connection that the peer refused and closed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(field, f"the peer refuses, and says: {message}")


class _Handshake:
    def __init__(self, wire: Wire, endpoint: Endpoint, until: float, *, initiator: bool) -> None:
        self._wire = wire
        self._endpoint = endpoint
        self._until = until
        self._initiator = initiator

    def run(self) -> Hello:
        ours, theirs = self._open()
        openings = (ours, theirs) if self._initiator else (theirs, ours)
        self._seal(None, openings)
        if self._endpoint.secret is not None:
            self._prove(self._endpoint.secret, openings)
            self._seal(self._endpoint.secret, openings)
        self._wire.limit = _HELLO_LIMIT
        return self._introduce()

    def _open(self) -> tuple[bytes, bytes]:
        flags = 0 if self._endpoint.secret is None else _WITH_SECRET
        ours = _OPENING.pack(_MAGIC, PROTOCOL, flags, secrets.token_bytes(32))
        if self._initiator:
            self._wire.write(frame(ours), self._until)
        theirs = self._wire.read(self._until)
        if len(theirs) != _OPENING.size or not theirs.startswith(_MAGIC):
            raise BadMessage(
                "what is there does not speak kvconnect's control protocol; check the address"
            )
        if not self._initiator:
            self._wire.write(frame(ours), self._until)
        _, version, their_flags, _ = _OPENING.unpack(theirs)
        if version != PROTOCOL:
            raise PeerRefused("protocol", f"{PROTOCOL} here, {version} at the peer")
        if flags != their_flags & _WITH_SECRET:
            one, other = ("here", "at the peer") if flags else ("at the peer", "here")
            raise PeerRefused("secret", f"is set {one} and not {other}; give both the same")
        return ours, theirs

    def _seal(self, secret: SharedSecret | None, openings: tuple[bytes, bytes]) -> None:
        mine, theirs = (_INITIATOR, _ACCEPTOR) if self._initiator else (_ACCEPTOR, _INITIATOR)
        self._wire.seal(Seal(secret, mine, *openings), Seal(secret, theirs, *openings))

    def _prove(self, secret: SharedSecret, openings: tuple[bytes, bytes]) -> None:
        mine, theirs = (_INITIATOR, _ACCEPTOR) if self._initiator else (_ACCEPTOR, _INITIATOR)
        proof = Proof(mac=secret.mac(mine, *openings))
        if self._initiator:
            self._send(proof)
        said = self._receive(Proof)
        if not secret.verifies(said.mac, theirs, *openings):
            raise PeerRefused("secret", "is another one at the peer; give both the same")
        if not self._initiator:
            self._send(proof)

    def _introduce(self) -> Hello:
        try:
            ours = self._endpoint.hello()
        except Exception as error:
            raise WireClosed(f"this process cannot describe itself: {error!r}") from error
        if self._initiator:
            self._send(ours)
        theirs = self._receive(Hello)
        check_compat(ours.compat, theirs.compat)
        if not self._initiator:
            self._send(ours)
        return theirs

    def _send(self, message: Message) -> None:
        self._wire.write(self._wire.frame(encode(message)), self._until)

    def _receive(self, kind: type[M]) -> M:
        message = decode(self._wire.read(self._until))
        if isinstance(message, Error):
            raise _ByPeer(_plain(message.field or message.kind), _plain(message.message))
        if not isinstance(message, kind):
            raise BadMessage(f"{type(message).__name__} where {kind.__name__} is due")
        return message


def _refusal(error: PeerRefused, *, known: bool) -> Error:
    """Returns the message that refuses the peer for `error`.

    It names no property of the model unless `known`: the peer has proved the secret.
    """
    if error.field in _OF_THE_MODEL and not known:
        return Error(kind="refused", field="compat", message=_DIFFERS)
    detail = str(error).removeprefix(f"{error.field}: ")[:1024]
    return Error(kind="refused", field=error.field, message=detail)


def _plain(text: str) -> str:
    """Returns a peer's `text` with unprintable characters replaced, for one line of a log."""
    return "".join(each if each.isprintable() else "?" for each in text)


def _say(wire: Wire, message: Message) -> None:
    with suppress(WireClosed, WireTimeout):
        wire.write(wire.frame(encode(message)), time.monotonic() + 0.5)
