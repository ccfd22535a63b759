"""Finds blocks in the store: few requests, none of them a listing.

The object of a block tells which neighbours share its payload, so one request answers for up to
``blocks_per_object`` keys: of every so many consecutive keys, one is asked for, all at the same
time. Only where objects turn out to hold fewer is there another round.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvconnect.backend import Child, StoredEntry
from kvconnect.backends.lanes import Lanes, results_of, settled
from kvconnect.backends.s3.bucket import Fetched, S3Bucket
from kvconnect.backends.s3.cache import AnswerCache
from kvconnect.backends.s3.format import BadRecord, Member, Record, record_nbytes
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.keys import BlockKey

__all__ = ["Absent", "Found", "S3Finder", "fetch_entry"]

_MOST_CACHED = 65_536
# More probes than this are worth a round that finds out where a prompt's blocks end.
_PROBES_AT_ONCE = 32


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A block that is stored.

    Attributes:
        record: it and the blocks that share its object.
        member: it.
        data_start: where its object's payload begins.
        etag: of the object that stands for it; ``None`` if only a neighbour's was read.
        expires_at: monotonic seconds after which it counts as gone.
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
        etag: of the object of its name that is damaged or too old; empty if there is none.
    """

    etag: str = ""


def fetch_entry(bucket: S3Bucket, settings: S3Settings, key: BlockKey) -> Found | Absent:
    """What the object of `key` says. Blocks.

    Raises:
        BackendUnavailable: it cannot be read.
    """
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
        return _entry(fetched, nbytes, settings, key)
    except BadRecord:
        return Absent(fetched.etag)


def _entry(fetched: Fetched, nbytes: int, settings: S3Settings, key: BlockKey) -> Found | Absent:
    record = Record.decode(fetched.data)
    member = record.find(key)
    start = 0 if record.payload is not None else nbytes
    if member is None or (start and start + member.nbytes != fetched.nbytes):
        return Absent(fetched.etag)
    left = float("inf") if settings.ttl_s is None else settings.ttl_s - fetched.age_s
    if left <= 0:
        return Absent(fetched.etag)
    return Found(record, member, start, fetched.etag, time.monotonic() + left)


class S3Finder:
    """Asks for blocks and remembers the answers. Belongs to one event loop."""

    def __init__(self, settings: S3Settings, bucket: S3Bucket, lanes: Lanes) -> None:
        self._settings = settings
        self._bucket = bucket
        self._lane = lanes["requests"]
        self._cache: AnswerCache[BlockKey, Found | Absent] = AnswerCache(_MOST_CACHED)
        self._asking: dict[BlockKey, asyncio.Task[Found | Absent]] = {}
        self._changes = 0

    def __len__(self) -> int:
        """Answers remembered."""
        return len(self._cache)

    async def leading(self, keys: Sequence[BlockKey]) -> list[Found]:
        """The leading `keys` that are stored.

        Raises:
            BackendUnavailable: the service cannot be asked.
        """
        answers: dict[BlockKey, Found | Absent] = {}
        for step in self._steps(len(keys)):
            self._remembered(keys, answers)
            known = _known(keys, answers)
            if known == len(keys) or isinstance(answers.get(keys[known]), Absent):
                break
            await self._ask(_probes(keys[known:], answers, step), answers)
        return [found for key in keys[:known] if isinstance(found := answers[key], Found)]

    async def present(self, keys: Sequence[BlockKey]) -> list[Found]:
        """Those of `keys` that are stored, and perhaps not all: of objects with few blocks.

        Raises:
            BackendUnavailable: the service cannot be asked.
        """
        found = await self.leading(keys)
        # Behind the first absent one there is mostly nothing; where there is, all are asked for.
        answers: dict[BlockKey, Found | Absent] = {}
        rest = keys[len(found) + 1 :]
        self._remembered(rest, answers)
        for step in (self._settings.blocks_per_object, 1):
            await self._ask([key for key in rest[::step] if key not in answers], answers)
            if not any(isinstance(answer, Found) for answer in answers.values()):
                break
        return [*found, *(one for one in answers.values() if isinstance(one, Found))]

    async def describe(self, keys: Sequence[BlockKey]) -> list[StoredEntry | None]:
        """What is known of `keys`; of those that are remembered without asking again.

        Raises:
            BackendUnavailable: the service cannot be asked.
        """
        entries = {
            one.member.key: one.member.entry(one.record.created_at)
            for one in await self.present(keys)
        }
        return [entries.get(key) for key in keys]

    async def children(self, key: BlockKey) -> list[Child]:
        """The blocks with tokens that follow `key` in its own object.

        Raises:
            BackendUnavailable: the service cannot be asked.
        """
        return [
            child for found in await self.leading([key]) for child in found.record.children(key)
        ]

    def stored(self, found: Iterable[Found]) -> None:
        """These were written just now."""
        self._changes += 1
        for one in found:
            self._cache.put(one.member.key, one, self._settings.lookup_ttl_s)

    def gone(self, keys: Collection[BlockKey]) -> None:
        """These were deleted, or turned out not to be there; so may their neighbours."""
        self._changes += 1
        for key in keys:
            answer = self._cache.get(key)
            if isinstance(answer, Found):
                for member in answer.record.members:
                    self._cache.drop(member.key)
            self._cache.drop(key)

    def _remembered(
        self, keys: Iterable[BlockKey], answers: dict[BlockKey, Found | Absent]
    ) -> None:
        now = time.monotonic()
        for key in keys:
            answer = self._cache.get(key)
            if answer is not None and (isinstance(answer, Absent) or now < answer.expires_at):
                answers.setdefault(key, answer)

    def _steps(self, num_keys: int) -> Iterator[int]:
        """For each round of questions, of how many keys one is asked for; 0: twice as far each."""
        step = self._settings.blocks_per_object
        if num_keys > _PROBES_AT_ONCE * step:
            yield 0
        yield step
        while True:  # what the others left open: objects of fewer blocks
            yield 1

    async def _ask(self, keys: Sequence[BlockKey], answers: dict[BlockKey, Found | Absent]) -> None:
        outcomes = await settled([self._asked(key) for key in keys])
        asked: list[Found | Absent] = results_of(outcomes)
        for key, answer in zip(keys, asked, strict=True):
            answers[key] = answer
            if isinstance(answer, Found):
                for found in _neighbours(answer):
                    answers.setdefault(found.member.key, found)

    def _asked(self, key: BlockKey) -> asyncio.Task[Found | Absent]:
        # Requests for one prompt come together: one of them asks for all.
        task = self._asking.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._answer(key))
            self._asking[key] = task
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        return task

    async def _answer(self, key: BlockKey) -> Found | Absent:
        changes = self._changes
        answer = await self._lane.run(lambda: fetch_entry(self._bucket, self._settings, key))
        # An answer that was on its way while something changed may be an old one.
        if changes == self._changes:
            self._remember(key, answer)
        return answer

    def _remember(self, key: BlockKey, answer: Found | Absent) -> None:
        if isinstance(answer, Absent):
            self._cache.put(key, answer, self._settings.miss_ttl_s)
            return
        for found in _neighbours(answer):
            # The newer answer is right, but one that was read itself tells more than a neighbour's.
            if found.etag is not None or not isinstance(self._cache.get(found.member.key), Found):
                self._cache.put(found.member.key, found, self._settings.lookup_ttl_s)


def _probes(
    keys: Sequence[BlockKey], answers: dict[BlockKey, Found | Absent], step: int
) -> list[BlockKey]:
    """Which of `keys` to ask for; the first is among them, and none behind one that is absent."""
    end = next((n for n, key in enumerate(keys) if isinstance(answers.get(key), Absent)), len(keys))
    if step == 0:
        numbers = [0, *(1 << n for n in range(end.bit_length()))]
        return [keys[number] for number in numbers if number < end and keys[number] not in answers]
    probes = [key for key in keys[:end:step] if key not in answers]
    return probes if step > 1 else probes[: 2 * _PROBES_AT_ONCE]


def _known(keys: Sequence[BlockKey], answers: dict[BlockKey, Found | Absent]) -> int:
    """How many leading `keys` are stored, as far as it is known."""
    found = (n for n, key in enumerate(keys) if not isinstance(answers.get(key), Found))
    return next(found, len(keys))


def _neighbours(found: Found) -> list[Found]:
    """It, and those that its record tells of."""
    return [
        found
        if member is found.member
        else Found(found.record, member, found.data_start, None, found.expires_at)
        for member in found.record.members
    ]
