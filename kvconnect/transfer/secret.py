"""The secret that processes on several hosts share, and where one is required."""

from __future__ import annotations

import hashlib
import hmac
from typing import NoReturn

from kvconnect.address import is_loopback
from kvconnect.errors import ConfigurationError
from kvconnect.redaction import HIDDEN

_SHORTEST = 16


class SharedSecret:
    """A secret that this process can prove to a peer without sending it. It is never printed.

    Args:
        secret: at least 16 bytes. Text is stripped of white space and encoded as UTF-8.

    Raises:
        ConfigurationError: the secret is too short.
    """

    __slots__ = ("_key",)

    def __init__(self, secret: str | bytes) -> None:
        key = secret.strip().encode() if isinstance(secret, str) else bytes(secret)
        if len(key) < _SHORTEST:
            raise ConfigurationError(
                f"secret: {len(key)} bytes are too few; give at least {_SHORTEST}, "
                "for example of `openssl rand -hex 32`"
            )
        self._key = key

    def __repr__(self) -> str:
        return f"SharedSecret({HIDDEN})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a SharedSecret is not pickled; give each process the secret")

    def mac(self, *parts: bytes) -> bytes:
        """Returns the HMAC-SHA256 of `parts`, each with its length before it."""
        code = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in parts:
            code.update(len(part).to_bytes(8, "big"))
            code.update(part)
        return code.digest()

    def verifies(self, mac: bytes, *parts: bytes) -> bool:
        """Returns whether `mac` is the `mac` of `parts`; compares in constant time."""
        return hmac.compare_digest(mac, self.mac(*parts))


def require_secret(field: str, host: str, secret: SharedSecret | None) -> None:
    """Checks that `host` is this machine's loopback or that there is a secret.

    Raises:
        ConfigurationError: neither is true; the message names `field` and the remedy.
    """
    if secret is None and not is_loopback(host):
        raise ConfigurationError(
            f"{field}: '{host}' is not a loopback address, so the peer must be authenticated; "
            "give both sides the same secret, or use 127.0.0.1"
        )
