"""The records that the store keeps about blocks, beside their bytes.

A record is ``magic | length | checksum | JSON``. A single block has one object: the record, then
the block's bytes. Blocks that share a payload object have one object each, which holds only the
record. All of them have the same record, which lists them all, so the reader of one block finds the
others.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from kvconnect.backend import Child, StoredBlock, StoredEntry
from kvconnect.backends.entries import BlockMetadata, key_from_text
from kvconnect.errors import Recompute
from kvconnect.keys import BlockKey

DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""The exceptions of reading JSON of an unexpected form."""

_MAGIC = b"KVCS3REC"
_PREAMBLE = struct.Struct("<8sI8s")  # magic, length of the JSON, its checksum
PREAMBLE_NBYTES = _PREAMBLE.size
_MOST_NBYTES = 16 << 20


class BadRecord(Recompute):
    """The error that an object with the name of a record is not a record."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A block of a record.

    Attributes:
        offset: the offset of the block's bytes in the payload.
        nbytes: the bytes of the block's value.
    """

    key: BlockKey
    offset: int
    nbytes: int
    metadata: BlockMetadata

    def entry(self, created_at: float) -> StoredEntry:
        """Returns the entry for `Backend.scan`; the time of use is not stored."""
        return self.metadata.entry(self.key, self.nbytes, created_at=created_at, used_at=created_at)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """The blocks that share an object.

    Attributes:
        members: in the order of their bytes.
        created_at: Unix seconds, by the writer's clock.
        payload: name of the payload object; ``None``: the bytes of the only member follow the
            record.
    """

    members: tuple[Member, ...]
    created_at: float
    payload: str | None = None

    @classmethod
    def of(cls, blocks: Sequence[StoredBlock], created_at: float, payload: str | None) -> Record:
        """Returns the record of `blocks`, whose bytes lie one after the other."""
        members, offset = [], 0
        for block in blocks:
            nbytes = block.data.numel()
            members.append(Member(block.key, offset, nbytes, BlockMetadata.of(block)))
            offset += nbytes
        return cls(tuple(members), created_at, payload)

    def find(self, key: BlockKey) -> Member | None:
        """Returns the member `key`."""
        return next((member for member in self.members if member.key == key), None)

    def tells_parent(self, member: Member) -> bool:
        """Returns whether the parent of `member` is a member, too, so that `children` lists it."""
        parent = member.metadata.parent
        return parent is not None and self.find(parent) is not None

    def without(self, keys: Collection[BlockKey]) -> Record:
        """Returns the record without `keys`; the others' bytes stay where they are."""
        return replace(self, members=tuple(m for m in self.members if m.key not in keys))

    def children(self, key: BlockKey) -> list[Child]:
        """Returns the members with tokens whose parent is `key`."""
        return [
            Child(member.key, member.metadata.tokens)
            for member in self.members
            if member.metadata.parent == key
            and member.metadata.tokens is not None
            and not member.metadata.has_expired
        ]

    def encode(self) -> bytes:
        """Encodes the record for `decode`."""
        blocks = [_to_json(member) for member in self.members]
        return pack({"at": self.created_at, "payload": self.payload, "blocks": blocks})

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Decodes the record at the beginning of `data`.

        Raises:
            BadRecord: the data is damaged, cut short, or of another kind.
        """
        try:
            content = unpack(data)
            payload = content["payload"]
            members = tuple(_from_json(block) for block in content["blocks"])
            if payload is not None and not (isinstance(payload, str) and payload.isalnum()):
                raise BadRecord("its payload has no name of ours")
            if not members or (payload is None and (len(members) > 1 or members[0].offset)):
                raise BadRecord(f"{len(members)} blocks cannot follow it")
            return cls(members, float(content["at"]), payload)
        except DAMAGED as error:
            raise BadRecord(f"not a record: {error!r}") from error


def record_nbytes(data: bytes) -> int:
    """Returns the bytes of the record that begins with `data`, at least `PREAMBLE_NBYTES` long.

    Raises:
        BadRecord: `data` is no beginning of a record.
    """
    if len(data) < PREAMBLE_NBYTES:
        raise BadRecord(f"{len(data)} bytes are no record")
    magic, length, _ = _PREAMBLE.unpack_from(data)
    if magic != _MAGIC or length > _MOST_NBYTES:
        raise BadRecord("not a record: wrong magic number")
    return PREAMBLE_NBYTES + int(length)


def pack(content: dict[str, Any]) -> bytes:
    """Encodes `content` as JSON with its length and checksum before it."""
    body = json.dumps(content, separators=(",", ":")).encode()
    return _PREAMBLE.pack(_MAGIC, len(body), xxhash.xxh3_64_digest(body)) + body


def unpack(data: bytes) -> dict[str, Any]:
    """Decodes the result of `pack`; `data` may be longer.

    Raises:
        BadRecord: the data is damaged, cut short, or of another kind.
    """
    end = record_nbytes(data)
    body = data[PREAMBLE_NBYTES:end]
    if len(data) < end or _PREAMBLE.unpack_from(data)[2] != xxhash.xxh3_64_digest(body):
        raise BadRecord("checksum mismatch")
    content = json.loads(body)
    if not isinstance(content, dict):
        raise BadRecord("not an object")
    return content


def _to_json(member: Member) -> dict[str, Any]:
    return {
        "key": member.key.hex(),
        "offset": member.offset,
        "nbytes": member.nbytes,
        **member.metadata.to_json(),
    }


def _from_json(content: dict[str, Any]) -> Member:
    offset, nbytes = int(content["offset"]), int(content["nbytes"])
    if offset < 0 or nbytes < 0:
        raise BadRecord("a block lies before its payload")
    metadata = BlockMetadata.from_json(content)
    return Member(key_from_text(content["key"]), offset, nbytes, metadata)
