"""Everything that is stored, by listing the bucket: for tools, never on a request's path."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from functools import partial

from kvconnect.backend import StoredEntry
from kvconnect.backends.lanes import Lanes, results_of
from kvconnect.backends.s3.bucket import Listed, S3Bucket
from kvconnect.backends.s3.find import Found, fetch_entry
from kvconnect.backends.s3.format import Record
from kvconnect.backends.s3.settings import S3Settings
from kvconnect.keys import BlockKey

__all__ = ["S3Listing"]

_ENTRY = re.compile(r"[0-9a-f]{64}")
_AT_ONCE = 128
_MOST_RECORDS = 4096
# `stats` is asked often; a store of more objects is counted by `scan`.
_MOST_PAGES = 10


class S3Listing:
    """Lists what a bucket holds. Belongs to one event loop."""

    def __init__(self, settings: S3Settings, bucket: S3Bucket, lanes: Lanes) -> None:
        self._settings = settings
        self._bucket = bucket
        self._lane = lanes["requests"]
        self._prefix = settings.name("k", "")

    async def entries(self) -> AsyncIterator[list[StoredEntry]]:
        """All blocks, some at a time.

        Raises:
            BackendUnavailable: the service cannot be asked.
        """
        pages = self._bucket.pages(self._prefix)
        records: OrderedDict[BlockKey, Record] = OrderedDict()
        while page := await self._lane.run(lambda: next(pages, None)):
            for start in range(0, len(page), _AT_ONCE):
                yield await self._described(page[start : start + _AT_ONCE], records)

    async def totals(self) -> dict[str, float]:
        """``blocks`` and ``bytes`` of all objects; nothing if there are too many to list."""
        return await self._lane.run(self._count)

    def _count(self) -> dict[str, float]:
        blocks = nbytes = 0
        pages = self._bucket.pages(self._settings.name("", "").rstrip("/") + "/")
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
        asked = [partial(fetch_entry, self._bucket, self._settings, key) for key in unknown]
        for result in results_of(await self._lane.run_all(asked)):
            if isinstance(result, Found):
                records.update((member.key, result.record) for member in result.record.members)
        entries = []
        for key, one in listed.items():
            record = records.pop(key, None)
            member = None if record is None else record.find(key)
            if record is None or member is None:
                continue  # damaged, or deleted since
            entries.append(member.entry(one.modified_at))
        while len(records) > _MOST_RECORDS:
            records.popitem(last=False)
        return entries

    def _key(self, listed: Listed) -> BlockKey | None:
        name = listed.name.removeprefix(self._prefix)
        return BlockKey(bytes.fromhex(name)) if _ENTRY.fullmatch(name) else None
