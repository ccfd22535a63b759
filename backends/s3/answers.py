"""The answers of the service about a block, and their cache."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvconnect.backends.s3.bucket import Fetched, S3Bucket
from kvconnect.backends.s3.format import BadRecord, Member, Record, record_nbytes
from kvconnect.keys import BlockKey

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A block that is stored.

    Attributes:
        record: the block and the blocks that share its object.
        member: the block.
        data_start: the offset of the payload in its object.
        etag: the etag of the object named after the block; ``None`` if only a neighbour's was read.
        expires_at: monotonic seconds after which the block counts as gone.
    """

    record: Record
    member: Member
    data_start: int
    etag: str | None
    expires_at: float


@dataclass(frozen=True, slots=True)
class Absent:
    """A block that is not stored.

    Attributes:
        etag: the etag of the block's damaged or expired object; empty if there is no object.
        damaged: true if that object is no record of the block. The answer may be wrong, and the
            object valid.
    """

    etag: str = ""
    damaged: bool = False


def fetch_entry(bucket: S3Bucket, key: BlockKey) -> Found | Absent:
    """Reads the state of a block from the object of `key`. Blocks.

    Raises:
        BackendUnavailable: the object cannot be read.
    """
    settings = bucket.settings
    name = settings.name("k", key.hex())
    limit = 1024 + 768 * settings.blocks_per_object
    fetched = bucket.fetch(name, limit)
    if fetched is None:
        return Absent()
    try:
        nbytes = record_nbytes(fetched.data)
        if nbytes > len(fetched.data) and nbytes <= fetched.nbytes:
            longer = bucket.fetch(name, nbytes)
            if longer is None or longer.etag != fetched.etag:
                return Absent()
            fetched = longer
        return _entry(fetched, nbytes, settings.ttl_s, key)
    except BadRecord:
        return Absent(fetched.etag, damaged=True)


def _entry(fetched: Fetched, nbytes: int, ttl_s: float, key: BlockKey) -> Found | Absent:
    record = Record.decode(fetched.data)
    member = record.find(key)
    start = 0 if record.payload is not None else nbytes
    if member is None or (start and start + member.nbytes != fetched.nbytes):
        return Absent(fetched.etag, damaged=True)
    until = member_until(member, time.monotonic() + ttl_s - fetched.age_s)
    if until <= time.monotonic():
        return Absent(fetched.etag)
    return Found(record, member, start, fetched.etag, until)


def member_until(member: Member, until: float) -> float:
    """Returns `until`, or the end of the block's own time if that is earlier: monotonic seconds."""
    end = member.metadata.expires_at
    return until if end is None else min(until, time.monotonic() + end - time.time())


def has_bytes(bucket: S3Bucket, found: Found) -> bool:
    """Returns whether the payload that `found` points to is there. Blocks.

    The payload may be absent: a lifecycle rule removes objects one by one. And if a service returns
    wrong objects for a while, a delete may remove a payload that blocks still need.

    Raises:
        BackendUnavailable: the request failed.
    """
    if found.record.payload is None:
        return True  # the bytes are in the object that was read
    fetched = bucket.fetch(bucket.settings.name("g", found.record.payload), 1)
    return fetched is not None and fetched.nbytes >= found.member.offset + found.member.nbytes


class AnswerCache(Generic[K, V]):
    """A cache of the answers used last, whose weights together are at most `capacity`.

    Belongs to one thread.

    Args:
        capacity: the sum of the weights.
        clock: monotonic seconds.
    """

    def __init__(self, capacity: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity = capacity
        self._clock = clock
        self._answers: OrderedDict[K, tuple[float, V, int]] = OrderedDict()
        self._weight = 0

    def __len__(self) -> int:
        return len(self._answers)

    def get(self, key: K) -> V | None:
        """Returns the answer for `key`, unless it is too old."""
        entry = self._answers.get(key)
        if entry is None:
            return None
        if self._clock() >= entry[0]:
            self.drop(key)
            return None
        self._answers.move_to_end(key)
        return entry[1]

    def put(self, key: K, answer: V, seconds: float, weight: int = 1) -> None:
        """Caches `answer` for `seconds`; 0: not at all."""
        self.drop(key)
        if seconds <= 0:
            return
        self._answers[key] = (self._clock() + seconds, answer, weight)
        self._weight += weight
        while self._weight > self._capacity:
            self.drop(next(iter(self._answers)))

    def drop(self, key: K) -> None:
        """Removes `key` from the cache."""
        entry = self._answers.pop(key, None)
        if entry is not None:
            self._weight -= entry[2]
