"""The encryption of payloads and tokens: AES-256-GCM under a key derived for each store key.

A store key depends on the tenant's salt, so tenants' blocks are under different keys. The store key
and the frame's header are authenticated with the payload: a block that was moved under another key,
or whose header was changed, is not decrypted.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from kvconnect.errors import BadFrame, ConfigurationError, MissingExtra, OtherCodec
from kvconnect.keys import BlockKey
from kvconnect.tokens import TokenArray

_KEY_NBYTES = 32
_KEY_FILE_MOST = 4096
_ID_NBYTES = 8
_NONCE_NBYTES = 12
_TAG_NBYTES = 16
# Each call holds Python's lock: the event loop must run between them.
_CHUNK = 256 << 10
_SALT = b"kvconnect aes-256-gcm"


def read_key_file(path: str) -> bytes:
    """Returns the secret in a key file: its content without trailing ends of line.

    Raises:
        ConfigurationError: the file cannot be read, or does not have 32 to 4,096 bytes.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            master = file.read(_KEY_FILE_MOST + 1).rstrip(b"\r\n")
    except OSError as error:
        raise ConfigurationError(f"key_file={path}: cannot be read: {error.strerror}") from error
    if not _KEY_NBYTES <= len(master) <= _KEY_FILE_MOST:
        raise ConfigurationError(
            f"key_file={path}: {len(master)} bytes; a key has {_KEY_NBYTES} random bytes or "
            f"more, as from: openssl rand -hex {_KEY_NBYTES}"
        )
    return master


@dataclass(frozen=True, slots=True)
class Cipher:
    """A cipher that derives its keys from one master key (HKDF-SHA256). Thread-safe.

    Attributes:
        id: distinguishes master keys, and reveals nothing else about them.
    """

    id: bytes
    _extracted: bytes = field(repr=False)

    @classmethod
    def from_file(cls, path: str) -> Self:
        """Reads the master key; see `read_key_file`.

        Raises:
            ConfigurationError: the file cannot be read, or is too short or too long for a key.
            MissingExtra: cryptography is not installed.
        """
        try:
            import cryptography.hazmat.primitives.ciphers  # noqa: F401
        except ImportError as error:
            raise MissingExtra("codec=aes-gcm", "codecs") from error
        extracted = hmac.digest(_SALT, read_key_file(path), "sha256")
        return cls(_expand(extracted, b"id")[:_ID_NBYTES], extracted)

    # ------------------------------------------------------------------ payloads

    def encrypt(self, plain: memoryview, out: memoryview, key: BlockKey, header: bytes) -> bytes:
        """Encrypts `plain` to `out`, which has the same length and may be the same memory.

        Args:
            plain: of any length.
            out: receives the encrypted bytes.
            key: store key of the block.
            header: bytes that are authenticated with `plain`.

        Returns:
            The `beside` of `decrypt`: the master key's id, nonce and tag.
        """
        from cryptography.hazmat.primitives.ciphers import Cipher as Engine
        from cryptography.hazmat.primitives.ciphers.algorithms import AES256
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        nonce = os.urandom(_NONCE_NBYTES)
        engine = Engine(AES256(self._key(b"payload", key)), GCM(nonce)).encryptor()
        engine.authenticate_additional_data(header + self.id)
        for start in range(0, len(plain), _CHUNK):
            out[start : start + _CHUNK] = engine.update(plain[start : start + _CHUNK])
        engine.finalize()
        return self.id + nonce + engine.tag

    def decrypt(self, data: memoryview, key: BlockKey, header: bytes, beside: bytes) -> None:
        """Decrypts `data` in place.

        Raises:
            OtherCodec: `data` was encrypted with another master key; nothing changed.
            BadFrame: `data` is not what was encrypted under this key; its bytes are undefined now.
        """
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers import Cipher as Engine
        from cryptography.hazmat.primitives.ciphers.algorithms import AES256
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        found, rest = beside[:_ID_NBYTES], beside[_ID_NBYTES:]
        if found != self.id:
            raise OtherCodec("encrypted with the key of another key_file")
        nonce, tag = rest[:_NONCE_NBYTES], rest[_NONCE_NBYTES:][:_TAG_NBYTES]
        engine = Engine(AES256(self._key(b"payload", key)), GCM(nonce, tag)).decryptor()
        engine.authenticate_additional_data(header + self.id)
        for start in range(0, len(data), _CHUNK):
            data[start : start + _CHUNK] = engine.update(data[start : start + _CHUNK])
        try:
            engine.finalize()
        except InvalidTag as error:
            raise BadFrame("aes-gcm: changed, or moved from another key") from error

    # ------------------------------------------------------------------ tokens

    def encrypt_tokens(
        self, tokens: TokenArray, key: BlockKey, parent: BlockKey | None
    ) -> TokenArray:
        """Encrypts `tokens` of the block `key` after `parent`; adds seven numbers to them."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        nonce = os.urandom(_NONCE_NBYTES)
        plain = tokens.astype("<i4").tobytes()
        secret = AESGCM(self._key(b"tokens", key)).encrypt(nonce, plain, parent or b"")
        return np.frombuffer(nonce + secret, "<i4").astype(np.int32)

    def decrypt_tokens(
        self, secret: TokenArray, key: BlockKey, parent: BlockKey | None
    ) -> TokenArray | None:
        """Decrypts a result of `encrypt_tokens`; returns ``None`` if `secret` is no such result."""
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        data = secret.astype("<i4").tobytes()
        if len(data) < _NONCE_NBYTES + _TAG_NBYTES:
            return None
        nonce, rest = data[:_NONCE_NBYTES], data[_NONCE_NBYTES:]
        try:
            plain = AESGCM(self._key(b"tokens", key)).decrypt(nonce, rest, parent or b"")
        except InvalidTag:
            return None
        return np.frombuffer(plain, "<i4").astype(np.int32)

    def _key(self, use: bytes, key: BlockKey) -> bytes:
        return _expand(self._extracted, use + b"\0" + key)


def _expand(extracted: bytes, info: bytes) -> bytes:
    """Returns the first 32 bytes of HKDF-Expand (RFC 5869)."""
    return hmac.digest(extracted, info + b"\x01", "sha256")
