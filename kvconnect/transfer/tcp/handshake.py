"""The first bytes on a connection: both sides prove that they know the secret.

The source sends a nonce. The reader sends the incarnation that it expects, a nonce and a proof. The
source answers with a status and its own proof. Each proof is an HMAC-SHA256 over both nonces, the
incarnation and the prover's role, so that no proof can be replayed or reflected. Without a secret
the key is empty, and the handshake only distinguishes incarnations. Later bytes on the connection
have codes and checksums that depend on both nonces, and are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time

from kvconnect.errors import PeerUnreachable
from kvconnect.transfer.seal import Seal, Seals
from kvconnect.transfer.secret import SharedSecret
from kvconnect.transfer.tcp.stream import receive_exactly

_MAGIC = b"KVT\x04"
_NONCE_NBYTES = 32
_GREETING = struct.Struct("<4s32s")
_CLAIM = struct.Struct("<4s16s32s32s")
_ANSWER = struct.Struct("<B32s")
_OK, _WRONG_SECRET, _WRONG_INCARNATION = range(3)


def _seals(secret: SharedSecret | None, *nonces: bytes) -> Seals:
    return Seals(Seal(secret, b"requests", *nonces), Seal(secret, b"answers", *nonces))


def _proof(secret: SharedSecret | None, role: bytes, *parts: bytes) -> bytes:
    if secret is not None:
        return secret.mac(_MAGIC, role, *parts)
    return hmac.digest(b"", b"".join((_MAGIC, role, *parts)), hashlib.sha256)


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.settimeout(max(deadline - time.monotonic(), 1e-3))
    connection.sendall(data)


def answer(
    connection: socket.socket, secret: SharedSecret | None, incarnation: bytes, deadline: float
) -> Seals | None:
    """Makes the source's side of the handshake. Blocks until `deadline` (monotonic) at most.

    Returns:
        The seals of the connection; ``None`` if the reader is refused.

    Raises:
        OSError: the connection broke, or was too slow (TimeoutError).
    """
    ours = secrets.token_bytes(_NONCE_NBYTES)
    _send(connection, _GREETING.pack(_MAGIC, ours), deadline)
    claim = _CLAIM.unpack(receive_exactly(connection, _CLAIM.size, deadline))
    magic, expected, theirs, proof = claim
    if magic != _MAGIC:
        return None
    if not hmac.compare_digest(proof, _proof(secret, b"reader", ours, theirs, expected)):
        _send(connection, _ANSWER.pack(_WRONG_SECRET, bytes(32)), deadline)
        return None
    if expected != incarnation:
        _send(connection, _ANSWER.pack(_WRONG_INCARNATION, bytes(32)), deadline)
        return None
    own = _proof(secret, b"source", theirs, ours, expected)
    _send(connection, _ANSWER.pack(_OK, own), deadline)
    return _seals(secret, ours, theirs)


def greet(
    connection: socket.socket, secret: SharedSecret | None, incarnation: bytes, deadline: float
) -> Seals:
    """Makes the reader's side of the handshake and returns the seals of the connection.

    Blocks until `deadline` (monotonic) at most.

    Raises:
        PeerUnreachable: the other side is no source, another incarnation, or has another secret.
        OSError: the connection broke, or was too slow (TimeoutError).
    """
    greeting = _GREETING.unpack(receive_exactly(connection, _GREETING.size, deadline))
    magic, theirs = greeting
    if magic != _MAGIC:
        raise PeerUnreachable(_other_protocol(magic))
    ours = secrets.token_bytes(_NONCE_NBYTES)
    proof = _proof(secret, b"reader", theirs, ours, incarnation)
    _send(connection, _CLAIM.pack(_MAGIC, incarnation, ours, proof), deadline)
    status, proof = _ANSWER.unpack(receive_exactly(connection, _ANSWER.size, deadline))
    if status == _WRONG_SECRET:
        raise PeerUnreachable("the peer refuses: its secret is another one")
    if status == _WRONG_INCARNATION:
        raise PeerUnreachable("another incarnation of the peer answers: it restarted")
    if not hmac.compare_digest(proof, _proof(secret, b"source", ours, theirs, incarnation)):
        raise PeerUnreachable("the peer's secret is another one")
    return _seals(secret, theirs, ours)


def _other_protocol(magic: bytes) -> str:
    if magic[:-1] == _MAGIC[:-1]:
        return (
            f"the peer speaks version {magic[-1]} of the transfer over TCP, this process version "
            f"{_MAGIC[-1]}: both sides need the same release"
        )
    return "what answers there speaks another protocol"
