"""The metadata that a store keeps of a block, as bytes and as JSON, for all stores."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvconnect.backend import Child, StoredBlock, StoredEntry
from kvconnect.keys import KEY_NBYTES, BlockKey
from kvconnect.tokens import TokenArray

if TYPE_CHECKING:
    from torch import Tensor

# priority, group, flags, bytes of namespace and model, tokens + 1 (0: not known)
_FIELDS = struct.Struct("<BiBHHI")
_HAS_PARENT, _HAS_END = 1, 2
_END = struct.Struct("<d")  # Unix seconds
_LATEST_END = 1e12


def end_of(block: StoredBlock) -> float | None:
    """Returns the ``expires_at`` of `block`, within the times that stores can write and read."""
    return None if block.expires_at is None else min(max(0.0, block.expires_at), _LATEST_END)


@dataclass(frozen=True, slots=True, eq=False)
class BlockMetadata:
    """The metadata of a stored block beside its key and its bytes; as in `StoredBlock`."""

    parent: BlockKey | None
    tokens: TokenArray | None
    priority: int
    namespace: bytes
    model: bytes
    group: int
    expires_at: float | None = None

    @classmethod
    def of(cls, block: StoredBlock) -> BlockMetadata:
        """Returns the metadata of `block`."""
        return cls(
            block.parent,
            block.tokens,
            block.priority,
            block.namespace,
            block.model,
            block.group,
            end_of(block),
        )

    @property
    def has_expired(self) -> bool:
        """Returns whether the block's own time is over."""
        return self.expires_at is not None and self.expires_at <= time.time()

    def entry(
        self, key: BlockKey, nbytes: int, *, created_at: float, used_at: float
    ) -> StoredEntry:
        """Returns the entry of the block for `Backend.scan`."""
        return StoredEntry(
            key=key, nbytes=nbytes, created_at=created_at, used_at=used_at, **self._fields()
        )

    def block(self, key: BlockKey, data: Tensor) -> StoredBlock:
        """Returns the block with its frame `data`, for saving it."""
        return StoredBlock(key=key, data=data, **self._fields())

    def _fields(self) -> dict[str, Any]:
        """Returns the fields, whose names are those of `StoredBlock` and `StoredEntry`."""
        return {name: getattr(self, name) for name in self.__slots__}

    def to_bytes(self) -> bytes:
        """Returns ``fields | parent | namespace | model | tokens | end``."""
        fields = _FIELDS.pack(
            self.priority,
            self.group,
            _HAS_PARENT * (self.parent is not None) | _HAS_END * (self.expires_at is not None),
            len(self.namespace),
            len(self.model),
            0 if self.tokens is None else len(self.tokens) + 1,
        )
        tokens = b"" if self.tokens is None else tokens_to_bytes(self.tokens)
        end = b"" if self.expires_at is None else _END.pack(self.expires_at)
        return b"".join((fields, self.parent or b"", self.namespace, self.model, tokens, end))

    @classmethod
    def from_bytes(cls, data: bytes) -> BlockMetadata | None:
        """Returns the metadata that `to_bytes` encoded; ``None`` if `data` is damaged."""
        if len(data) < _FIELDS.size:
            return None
        priority, group, flags, namespace, model, count = _FIELDS.unpack_from(data)
        at, pieces = _FIELDS.size, []
        parent_nbytes = KEY_NBYTES if flags & _HAS_PARENT else 0
        end_nbytes = _END.size if flags & _HAS_END else 0
        for nbytes in (parent_nbytes, namespace, model, 4 * max(0, count - 1), end_nbytes):
            pieces.append(data[at : at + nbytes])
            at += nbytes
        if at != len(data) or flags > _HAS_PARENT | _HAS_END:
            return None
        parent = BlockKey(pieces[0]) if parent_nbytes else None
        tokens = tokens_from_bytes(pieces[3]) if count else None
        (expires_at,) = _END.unpack(pieces[4]) if end_nbytes else (None,)
        if expires_at is not None and not 0 <= expires_at <= _LATEST_END:
            return None
        return cls(parent, tokens, priority, pieces[1], pieces[2], group, expires_at)

    def to_json(self) -> dict[str, str | int | float]:
        """Returns the metadata by field; bytes in hexadecimal, tokens in base64."""
        content: dict[str, str | int | float] = {"priority": self.priority}
        if self.parent is not None:
            content["parent"] = self.parent.hex()
        if self.tokens is not None:
            content["tokens"] = _tokens_to_text(self.tokens)
        if self.namespace:
            content["namespace"] = self.namespace.hex()
        if self.model:
            content["model"] = self.model.hex()
        if self.group:
            content["group"] = self.group
        if self.expires_at is not None:
            content["expires"] = self.expires_at
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> BlockMetadata:
        """Returns the metadata that `to_json` encoded; ignores other names in `content`.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: `content` is damaged.
        """
        tokens, end = content.get("tokens"), content.get("expires")
        if end is not None and not 0 <= end <= _LATEST_END:
            raise ValueError(f"expires: {end} is no time")
        return cls(
            key_from_text(content["parent"]) if "parent" in content else None,
            None if tokens is None else _tokens_from_text(tokens),
            int(content["priority"]),
            bytes.fromhex(content.get("namespace", "")),
            bytes.fromhex(content.get("model", "")),
            int(content.get("group", 0)),
            None if end is None else float(end),
        )


def child_to_bytes(child: Child) -> bytes:
    """Returns ``key | tokens``."""
    return child.key + tokens_to_bytes(child.tokens)


def child_from_bytes(data: bytes) -> Child | None:
    """Returns the argument of `child_to_bytes`; ``None`` if `data` is damaged."""
    if len(data) < KEY_NBYTES or len(data) % 4:
        return None
    return Child(BlockKey(data[:KEY_NBYTES]), tokens_from_bytes(data[KEY_NBYTES:]))


def child_to_json(child: Child) -> dict[str, str]:
    """Returns the key in hexadecimal and the tokens in base64."""
    return {"key": child.key.hex(), "tokens": _tokens_to_text(child.tokens)}


def child_from_json(content: Mapping[str, Any]) -> Child:
    """Returns the argument of `child_to_json`.

    Raises:
        KeyError, TypeError, ValueError: `content` is damaged.
    """
    return Child(key_from_text(content["key"]), _tokens_from_text(content["tokens"]))


def key_from_text(text: str) -> BlockKey:
    """Returns the key that `text` writes in hexadecimal.

    Raises:
        ValueError: `text` is no key.
    """
    key = bytes.fromhex(text)
    if len(key) != KEY_NBYTES:
        raise ValueError(f"{len(key)} bytes are no key")
    return BlockKey(key)


def tokens_to_bytes(tokens: TokenArray) -> bytes:
    """Returns `tokens` as little-endian int32."""
    return tokens.astype("<i4", copy=False).tobytes()


def tokens_from_bytes(data: bytes) -> TokenArray:
    """Returns the argument of `tokens_to_bytes`."""
    return np.frombuffer(data, "<i4").astype(np.int32)


def _tokens_to_text(tokens: TokenArray) -> str:
    return base64.b64encode(tokens_to_bytes(tokens)).decode()


def _tokens_from_text(text: str) -> TokenArray:
    return tokens_from_bytes(base64.b64decode(text, validate=True))
