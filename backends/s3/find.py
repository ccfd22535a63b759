"""The search for blocks with few requests and no listing; and the listing of blocks, for tools.

The object of a block names the neighbours that share its payload, so one request answers for up to
``blocks_per_object`` keys: one of that many consecutive keys is requested, all at the same time.
Only if objects hold fewer blocks is there another round.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from functools import partial

from kvconnect.backend import Child, StoredEntry
from kvconnect.backends.lanes import Lanes, results_of, settled
from kvconnect.backends.s3.answers import Absent, AnswerCache, Found, fetch_entry, member_until
from kvconnect.backends.s3.bucket import Listed, S3Bucket
from kvconnect.backends.s3.format import Record
from kvconnect.keys import BlockKey

# The KiB of all records that are cached, which are as long as their writers made them.
_MOST_CACHED = 131_072
# The probes above which an additional round to find the end of a prompt's blocks pays.
_PROBES_AT_ONCE = 32
_ENTRY = re.compile(r"[0-9a-f]{64}")
_LISTED_AT_ONCE = 128
_MOST_RECORDS = 4096
# The most objects that `stats`, which is called often, lists; tools count more by `scan`.
_MOST_PAGES = 10


class S3Finder:
    """Requests the state of blocks and caches it. Belongs to one event loop."""

    def __init__(self, bucket: S3Bucket, lanes: Lanes) -> None:
        self._bucket = bucket
        self._lane = lanes["requests"]
        self._cache: AnswerCache[BlockKey, Found | Absent] = AnswerCache(_MOST_CACHED)
        self._asking: dict[BlockKey, asyncio.Task[Found | Absent]] = {}
        self._changes = 0

    def __len__(self) -> int:
        """Returns the number of cached answers."""
        return len(self._cache)

    async def leading(self, keys: Sequence[BlockKey]) -> list[Found]:
        """Returns the leading `keys` that are stored.

        Raises:
            BackendUnavailable: a request failed.
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
        """Returns those of `keys` that are stored; may miss some in objects with few blocks.

        Raises:
            BackendUnavailable: a request failed.
        """
        found = await self.leading(keys)
        # After the first absent key there are mostly no others; if there are, all are requested.
        answers: dict[BlockKey, Found | Absent] = dict.fromkeys(keys[len(found) :][:1], Absent())
        rest = keys[len(found) + 1 :]
        self._remembered(rest, answers)
        for step in (self._bucket.settings.blocks_per_object, 1):
            await self._ask([key for key in rest[::step] if key not in answers], answers)
            if not any(isinstance(answer, Found) for answer in answers.values()):
                break
        return [*found, *(one for one in answers.values() if isinstance(one, Found))]

    async def standing(self, keys: Sequence[BlockKey]) -> list[Found]:
        """Returns those of `present` whose own object exists, not only a neighbour's.

        A lookup that happens to request the block itself would not find it.

        Raises:
            BackendUnavailable: a request failed.
        """
        found = await self.present(keys)
        own = {one.member.key: one for one in found if one.etag is not None}
        answers: dict[BlockKey, Found | Absent] = {}
        await self._ask([one.member.key for one in found if one.etag is None], answers)
        # A neighbour's record does not count for a block that was requested itself.
        each = (own.get(one.member.key, answers.get(one.member.key)) for one in found)
        return [one for one in each if isinstance(one, Found)]

    async def describe(self, keys: Sequence[BlockKey]) -> list[StoredEntry | None]:
        """Returns the entries of `keys`; cached ones without another request.

        Raises:
            BackendUnavailable: a request failed.
        """
        entries = {
            one.member.key: one.member.entry(one.record.created_at)
            for one in await self.present(keys)
        }
        return [entries.get(key) for key in keys]

    async def children(self, key: BlockKey) -> list[Child]:
        """Returns the blocks with tokens that follow `key` in its own object.

        Raises:
            BackendUnavailable: a request failed.
        """
        return [
            child for found in await self.leading([key]) for child in found.record.children(key)
        ]

    def stored(self, found: Iterable[Found]) -> None:
        """Caches blocks that were written just now."""
        self._changes += 1
        for one in found:
            self._cache.put(one.member.key, one, self._bucket.settings.lookup_ttl_s)

    def gone(self, keys: Collection[BlockKey]) -> None:
        """Removes `keys`, absent or deleted, and the others of their records from the cache."""
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
        """Yields for each round the distance between requested keys; 0: the distance doubles."""
        step = self._bucket.settings.blocks_per_object
        if num_keys > _PROBES_AT_ONCE * step:
            yield 0
        yield step
        while True:  # keys without an answer, in objects of fewer blocks
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
        # Requests for one prompt arrive together, so one of them serves all.
        task = self._asking.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._answer(key))
            self._asking[key] = task
            task.add_done_callback(lambda _: self._asking.pop(key, None))
        return task

    async def _answer(self, key: BlockKey) -> Found | Absent:
        changes = self._changes
        answer = await self._lane.run(lambda: fetch_entry(self._bucket, key))
        # An answer that was under way during a change may be outdated.
        if changes == self._changes:
            self._remember(key, answer)
        return answer

    def _remember(self, key: BlockKey, answer: Found | Absent) -> None:
        if isinstance(answer, Absent):
            self._cache.put(key, answer, self._bucket.settings.miss_ttl_s)
            return
        whole = _kib(answer.record)
        share = whole // len(answer.record.members)
        for found in _neighbours(answer):
            # The newer answer is right, but a block's own record has more than a neighbour's.
            if found.etag is not None or not isinstance(self._cache.get(found.member.key), Found):
                weight = 1 + (share if found.etag is None else whole)
                seconds = self._bucket.settings.lookup_ttl_s
                self._cache.put(found.member.key, found, seconds, weight)


def _kib(record: Record) -> int:
    """Returns about how many KiB of memory `record` takes."""
    kept = [one.metadata for one in record.members]
    tokens = sum(one.tokens.nbytes for one in kept if one.tokens is not None)
    return (tokens + sum(256 + len(one.namespace) + len(one.model) for one in kept)) >> 10


def _probes(
    keys: Sequence[BlockKey], answers: dict[BlockKey, Found | Absent], step: int
) -> list[BlockKey]:
    """Returns the `keys` to request: the first one, others at `step`, none after an absent one."""
    end = next((n for n, key in enumerate(keys) if isinstance(answers.get(key), Absent)), len(keys))
    if step == 0:
        numbers = [0, *(1 << n for n in range(end.bit_length()))]
        return [keys[number] for number in numbers if number < end and keys[number] not in answers]
    probes = [key for key in keys[:end:step] if key not in answers]
    return probes if step > 1 else probes[: 2 * _PROBES_AT_ONCE]


def _known(keys: Sequence[BlockKey], answers: dict[BlockKey, Found | Absent]) -> int:
    """Returns how many leading `keys` are known to be stored."""
    found = (n for n, key in enumerate(keys) if not isinstance(answers.get(key), Found))
    return next(found, len(keys))


def _neighbours(found: Found) -> list[Found]:
    """Returns `found` and the other members of its record."""
    return [
        found
        if member is found.member
        else Found(
            found.record, member, found.data_start, None, member_until(member, found.expires_at)
        )
        for member in found.record.members
        if not member.metadata.has_expired
    ]


class S3Listing:
    """The listing of a bucket, which lookups and loads never use. Belongs to one event loop."""

    def __init__(self, bucket: S3Bucket, lanes: Lanes) -> None:
        self._bucket = bucket
        self._lane = lanes["requests"]
        self._prefix = bucket.settings.name("k", "")

    async def entries(self) -> AsyncIterator[list[StoredEntry]]:
        """Yields the entries of all blocks, some at a time.

        Raises:
            BackendUnavailable: a request failed.
        """
        pages = self._bucket.pages(self._prefix)
        records: OrderedDict[BlockKey, Record] = OrderedDict()
        while (page := await self._lane.run(lambda: next(pages, None))) is not None:
            for start in range(0, len(page), _LISTED_AT_ONCE):
                yield await self._described(page[start : start + _LISTED_AT_ONCE], records)

    async def totals(self) -> dict[str, float]:
        """Returns ``blocks`` and ``bytes`` of all objects; empty if there are too many to list."""
        return await self._lane.run(self._count)

    def _count(self) -> dict[str, float]:
        blocks = nbytes = 0
        pages = self._bucket.pages(self._bucket.settings.name("", "").rstrip("/") + "/")
        for number, page in enumerate(pages):
            if number == _MOST_PAGES:
                return {}
            blocks += sum(self._key(listed) is not None for listed in page)
            nbytes += sum(listed.nbytes for listed in page)
        return {"blocks": blocks, "bytes": nbytes}

    async def _described(
        self, page: Sequence[Listed], records: OrderedDict[BlockKey, Record]
    ) -> list[StoredEntry]:
        listed = {key: one for one in page if (key := self._key(one)) is not None}
        unknown = [key for key in listed if key not in records]
        asked = [partial(fetch_entry, self._bucket, key) for key in unknown]
        for result in results_of(await self._lane.run_all(asked)):
            if isinstance(result, Found):
                records.update((member.key, result.record) for member in result.record.members)
        entries = []
        for key, one in listed.items():
            record = records.pop(key, None)
            member = None if record is None else record.find(key)
            if record is None or member is None or member.metadata.has_expired:
                continue  # damaged, or deleted since
            entries.append(member.entry(one.modified_at))
        while len(records) > _MOST_RECORDS:
            records.popitem(last=False)
        return entries

    def _key(self, listed: Listed) -> BlockKey | None:
        name = listed.name.removeprefix(self._prefix)
        return BlockKey(bytes.fromhex(name)) if _ENTRY.fullmatch(name) else None
