"""Codes by which a receiver sees that a message is the next one, and unchanged."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import xxhash

from kvconnect.transfer.secret import SharedSecret

CODE_NBYTES = 16
"""Bytes of a code."""

GUARD_NBYTES = 4
"""Bytes of a guard."""

_LABEL = b"kvconnect seal"


class Seal:
    """The codes of the messages that one side of a connection sends, in their order.

    A code covers the message, the number of messages before it, and `context`. With a secret it is
    a keyed BLAKE2b: only a process that knows the secret can make it. Without a secret it is an
    xxh3-128, which shows damage, repetition and loss, but can be forged.

    Sender and receiver each have a `Seal`, made with equal arguments. Not thread-safe.

    Args:
        secret: shared by both sides; ``None`` if there is none.
        context: the nonces of both sides, and the name of the side that sends.
    """

    def __init__(self, secret: SharedSecret | None, *context: bytes) -> None:
        joined = b"".join(len(part).to_bytes(8, "big") + part for part in (_LABEL, *context))
        self._key = hashlib.blake2b(joined).digest() if secret is None else secret.mac(joined)
        self._is_secret = secret is not None
        self._count = 0

    def code(self, message: bytes) -> bytes:
        """Counts `message` as the next message and returns its code."""
        number = self._count.to_bytes(8, "big")
        self._count += 1
        if self._is_secret:
            code = hashlib.blake2b(number, digest_size=CODE_NBYTES, key=self._key)
            code.update(message)
            return code.digest()
        checksum = xxhash.xxh3_128(self._key + number)
        checksum.update(message)
        return checksum.digest()

    def fits(self, code: bytes, message: bytes) -> bool:
        """Counts `message` as the next message and returns whether `code` is its code.

        If not, no later code fits either.
        """
        return hmac.compare_digest(code, self.code(message))

    def guard(self, head: bytes) -> bytes:
        """Returns a short code of the `head` of the next message, before its own code is known.

        A receiver that waits for as many bytes as the head says checks this first.
        """
        number = self._count.to_bytes(8, "big")
        return xxhash.xxh3_64_digest(self._key + number + head)[:GUARD_NBYTES]

    def derived(self, purpose: bytes) -> bytes:
        """Returns 8 bytes for `purpose` that both sides know, and with a secret only they."""
        return hashlib.blake2b(purpose, digest_size=8, key=self._key).digest()


@dataclass(frozen=True, slots=True)
class Seals:
    """The codes of both directions of a connection: the reader's requests, the source's answers."""

    requests: Seal
    answers: Seal
