"""The loads of blocks: neighbours in one request, long ones in several parallel requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvconnect.backends.lanes import Lanes, results_of
from kvconnect.backends.s3.answers import Found, fetch_entry
from kvconnect.backends.s3.bucket import Gone, S3Bucket
from kvconnect.backends.s3.find import S3Finder
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import BlockKey

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False)
class _Part:
    """The bytes of an object that one request reads.

    Attributes:
        name: the name of the object.
        start: the offset in the object.
        number: the index of the first block in them.
        etag: the etag of the object; ``None`` where no other writer uses that name.
        views: receive the bytes, one after the other.
        nbytes: the bytes of all views.
    """

    name: str
    start: int
    number: int
    etag: str | None
    views: list[memoryview] = field(default_factory=list)
    nbytes: int = 0


class S3Reader:
    """The reader of blocks that an `S3Finder` finds. Belongs to one event loop."""

    def __init__(self, bucket: S3Bucket, lanes: Lanes, finder: S3Finder) -> None:
        self._bucket = bucket
        self._lane = lanes["transfers"]
        self._finder = finder

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fills the leading `into`; returns how many.

        Raises:
            BackendUnavailable: `into` is undefined; nothing writes to it any more.
        """
        found = await self._finder.leading(keys)
        for number, one in enumerate(found):
            if one.member.nbytes > into[number].numel():
                del found[number:]
                break
        parts = self._parts(found, into)
        read = self._bucket.read
        results = await self._lane.run_all(
            [partial(read, part.name, part.start, part.views, part.etag) for part in parts]
        )
        gone = [
            part.number
            for part, result in zip(parts, results, strict=True)
            if isinstance(result, Gone)
        ]
        if gone:
            await self._forget([found[number] for number in gone])
        results_of([result for result in results if not isinstance(result, Gone)])
        return min(gone, default=len(found))

    def _parts(self, found: Sequence[Found], into: Sequence[Tensor]) -> list[_Part]:
        parts: list[_Part] = []
        most = self._bucket.settings.part_nbytes
        for number, (one, buffer) in enumerate(zip(found, into, strict=False)):
            name = self.object_name(one)
            start = one.data_start + one.member.offset
            view = buffer.numpy().data[: one.member.nbytes]
            while view.nbytes:
                last = parts[-1] if parts else None
                if (
                    last is None
                    or last.name != name
                    or last.start + last.nbytes != start
                    or last.nbytes >= most
                ):
                    # A single block may have been deleted and saved again, with a longer record.
                    etag = one.etag if one.record.payload is None else None
                    last = _Part(name, start, number, etag)
                    parts.append(last)
                piece = view[: most - last.nbytes]
                last.views.append(piece)
                last.nbytes += piece.nbytes
                start += piece.nbytes
                view = view[piece.nbytes :]
        return parts

    def object_name(self, found: Found) -> str:
        """Returns the name of the object that holds the bytes of `found`."""
        if found.record.payload is None:
            return self._bucket.settings.name("k", found.member.key.hex())
        return self._bucket.settings.name("g", found.record.payload)

    async def _forget(self, gone: Sequence[Found]) -> None:
        """Removes the objects that refer to missing payloads.

        A lifecycle rule or a person removed the payload. Otherwise the objects that refer to it
        would still be found, and no save could replace them.
        """
        self._finder.gone([found.member.key for found in gone])
        pointing = [
            (member.key, found.record.payload)
            for found in gone
            if found.record.payload is not None
            for member in found.record.members
        ]
        results = await self._lane.run_all(
            [partial(self._unpoint, key, payload) for key, payload in dict.fromkeys(pointing)]
        )
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, BackendUnavailable):
                raise result

    def _unpoint(self, key: BlockKey, payload: str) -> None:
        entry = fetch_entry(self._bucket, key)
        if isinstance(entry, Found) and entry.record.payload == payload:
            self._bucket.remove(self._bucket.settings.name("k", key.hex()))
