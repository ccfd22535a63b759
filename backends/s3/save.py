"""The saves and deletions of blocks.

The payload of an object's blocks is written first, under a name that no other writer uses, and then
one small object for each block that points to it, on the condition that there is none. So a block
is stored wholly or not at all, and of two writers the first one's objects stay. A payload without
such objects, left by a writer that died, is removed by a lifecycle rule. A single block has one
object with record and payload.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from kvconnect.backend import StoredBlock
from kvconnect.backends.lanes import Lanes, results_of, settled
from kvconnect.backends.s3.answers import Absent, Found, fetch_entry, has_bytes, member_until
from kvconnect.backends.s3.bucket import Conflict, S3Bucket
from kvconnect.backends.s3.children import S3Children
from kvconnect.backends.s3.errors import was_answered
from kvconnect.backends.s3.find import S3Finder
from kvconnect.backends.s3.format import Member, Record
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import BlockKey

# The most bytes of one request, because a failure in the middle of more would be costly.
_MOST_OBJECT_NBYTES = 64 << 20
_TRIES = 4


class S3Writer:
    """Saves and deletes blocks. Belongs to one event loop."""

    def __init__(
        self, bucket: S3Bucket, lanes: Lanes, finder: S3Finder, children: S3Children
    ) -> None:
        self._bucket = bucket
        self._lane = lanes["transfers"]
        self._finder = finder
        self._children = children

    # ------------------------------------------------------------------ saving

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Stores `blocks`; returns how many leading ones are stored.

        Raises:
            BackendUnavailable: a request failed; each block is stored wholly or not at all.
        """
        unique = {block.key: block for block in reversed(blocks)}
        ordered = [unique[key] for key in dict.fromkeys(block.key for block in blocks)]
        # The conditions of the writes detect blocks that this misses.
        found = await self._whole([block.key for block in ordered])
        stored = {one.member.key for one in found}
        missing = [block for block in ordered if block.key not in stored]
        error = None
        objects = [asyncio.ensure_future(self._save_object(one)) for one in self._objects(missing)]
        for result in await settled(objects):
            if isinstance(result, BaseException):
                error = result
            else:
                self._finder.stored(result)
                stored.update(one.member.key for one in result)
        # Also blocks that exist, but are not listed by their parent's object: the list of
        # children that has them may have been lost.
        told = {one.member.key for one in found if one.record.tells_parent(one.member)}
        saved = {block.key for block in missing}
        await self._children.list_new(
            [
                *self._objects([block for block in missing if block.key in stored]),
                *([block] for block in ordered if block.key not in saved | told),
            ]
        )
        if error is not None:
            raise error
        return next((n for n, block in enumerate(blocks) if block.key not in stored), len(blocks))

    async def _whole(self, keys: Sequence[BlockKey]) -> list[Found]:
        """Returns those of `keys` that are stored with their bytes; may miss some."""
        found = await self._finder.standing(keys)
        payloads = {one.record.payload: one for one in found}
        asked = [partial(has_bytes, self._bucket, one) for one in payloads.values()]
        there = dict(zip(payloads, results_of(await self._lane.run_all(asked)), strict=True))
        return [one for one in found if there[one.record.payload]]

    def _objects(self, blocks: Sequence[StoredBlock]) -> Iterator[list[StoredBlock]]:
        """Yields `blocks` in groups that share an object: neighbours of one chain."""
        current: list[StoredBlock] = []
        nbytes = 0
        for block in sorted(blocks, key=lambda block: block.group):
            if current and (
                len(current) >= self._bucket.settings.blocks_per_object
                or nbytes + block.data.numel() > _MOST_OBJECT_NBYTES
                or block.group != current[-1].group
                or block.parent not in {None, current[-1].key}
            ):
                yield current
                current, nbytes = [], 0
            current.append(block)
            nbytes += block.data.numel()
        if current:
            yield current

    async def _save_object(self, blocks: Sequence[StoredBlock]) -> list[Found]:
        """Stores `blocks` in one object; returns those that are stored then, by any writer."""
        views = [block.data.numpy().data for block in blocks]
        payload = None if len(blocks) == 1 else uuid.uuid4().hex
        record = Record.of(blocks, time.time(), payload)
        head = record.encode()
        if payload is None:
            return await self._point(record, [head, *views])
        name = self._bucket.settings.name("g", payload)
        await self._lane.run(lambda: self._bucket.put(name, views, replaces=None))
        try:
            found = await self._point(record, [head])
        except BackendUnavailable as error:
            if was_answered(error):  # a service that is out of reach cannot be asked
                with suppress(BackendUnavailable):
                    await self._shrink({payload: record}, ())
            raise
        lost = {one.member.key for one in found if one.record is not record}
        if lost:
            # Another writer was faster with these blocks: their bytes in this object are not used.
            await self._shrink({payload: record}, lost)
            left = record.without(lost)
            found = [replace(one, record=left) if one.record is record else one for one in found]
        return found

    async def _point(self, record: Record, views: Sequence[memoryview | bytes]) -> list[Found]:
        """Writes the objects of the blocks of `record`; returns what these objects hold then."""
        writes = [partial(self._write_entry, record, member, views) for member in record.members]
        return results_of(await self._lane.run_all(writes))

    def _write_entry(
        self, record: Record, member: Member, views: Sequence[memoryview | bytes]
    ) -> Found:
        name = self._bucket.settings.name("k", member.key.hex())
        etag = ""
        for _ in range(_TRIES):
            try:
                written = self._bucket.put(name, views, replaces=etag)
            except Conflict:
                entry = fetch_entry(self._bucket, member.key)
                if isinstance(entry, Found):
                    # Our own object: the answer to the first attempt was lost.
                    if entry.record.payload is not None and entry.record.payload == record.payload:
                        return replace(entry, record=record, member=member)
                    if has_bytes(self._bucket, entry):
                        return entry
                etag = entry.etag or ""
            else:
                start = 0 if record.payload is not None else len(views[0])
                until = time.monotonic() + self._bucket.settings.ttl_s
                until = member_until(member, until)
                return Found(record, member, start, written, until)
        raise BackendUnavailable(f"{self._bucket.settings}: others keep changing {name}")

    # ------------------------------------------------------------------ deleting

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Deletes `keys`; a payload is removed with its last block.

        Raises:
            BackendUnavailable: a request failed; some blocks may be deleted, others not.
        """
        unique = list(dict.fromkeys(keys))
        try:
            asked = [partial(fetch_entry, self._bucket, key) for key in unique]
            entries: list[Found | Absent] = results_of(await self._lane.run_all(asked))
            there = [
                key
                for key, entry in zip(unique, entries, strict=True)
                if isinstance(entry, Found) or entry.etag
            ]
            found = [entry for entry in entries if isinstance(entry, Found)]
            # Before the blocks: the tokens in the lists are found by the records of the blocks.
            await self._children.unlist(one.member for one in found)
            removals = [
                partial(self._bucket.remove, self._bucket.settings.name("k", key.hex()))
                for key in there
            ]
            results_of(await self._lane.run_all(removals))
            records = {one.record.payload: one.record for one in found}
            await self._shrink(
                {payload: record for payload, record in records.items() if payload is not None},
                set(unique),
            )
        finally:
            self._finder.gone(unique)

    async def _shrink(self, records: Mapping[str, Record], gone: Collection[BlockKey]) -> None:
        """Removes `gone` from the records of each payload; removes payloads that no block needs."""
        for payload, record in records.items():
            left = [member.key for member in record.members if member.key not in gone]
            shrunk = [partial(self._shrink_entry, key, payload, gone) for key in left]
            if not any(results_of(await self._lane.run_all(shrunk))):
                name = self._bucket.settings.name("g", payload)
                await self._lane.run(partial(self._bucket.remove, name))

    def _shrink_entry(self, key: BlockKey, payload: str, gone: Collection[BlockKey]) -> bool:
        """Removes `gone` from the record of `key`; returns whether it still points to `payload`."""
        name = self._bucket.settings.name("k", key.hex())
        for _ in range(_TRIES):
            entry = fetch_entry(self._bucket, key)
            if isinstance(entry, Absent):
                # After an invalid answer, nothing is deleted that others may still need.
                return entry.damaged
            if entry.record.payload != payload:
                return False
            reduced = entry.record.without(gone)
            if len(reduced.members) == len(entry.record.members):
                return True
            try:
                self._bucket.put(name, [reduced.encode()], replaces=entry.etag)
            except Conflict:
                continue
            return True
        return True  # other writers keep changing it
