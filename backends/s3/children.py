"""The lists of blocks that follow a block and are not in its own record.

One small object per parent lists blocks that were saved apart from it: tails, and first blocks of
later saves. It is read, extended and written back on the condition that no other writer did so
meanwhile. The list is a hint: a missing block is only not found by a prompt that uses part of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from functools import reduce
from typing import Any, TypeAlias

from kvconnect.backend import MAX_CHILDREN, Child, StoredBlock
from kvconnect.backends.entries import child_from_json, child_to_json
from kvconnect.backends.lanes import Lanes, results_of, settled
from kvconnect.backends.s3.answers import AnswerCache
from kvconnect.backends.s3.bucket import Conflict, S3Bucket
from kvconnect.backends.s3.format import DAMAGED, BadRecord, Member, pack, unpack
from kvconnect.errors import BackendUnavailable
from kvconnect.keys import BlockKey
from kvconnect.trace import warn_once

# The KiB of all lists that are cached, and the KiB that a short one counts as.
_MOST_CACHED = 65_536
_LEAST_WEIGHT = 64
_MOST_NBYTES = 4 << 20
_TRIES = 8
_PAUSE_S = 0.01
_LOCKS = 64

_Change: TypeAlias = Callable[[list[Child]], list[Child]]


class S3Children:
    """The lists of children. Belongs to one event loop."""

    def __init__(self, bucket: S3Bucket, lanes: Lanes) -> None:
        self._bucket = bucket
        self._lane = lanes["requests"]
        self._cache: AnswerCache[BlockKey | None, list[Child]] = AnswerCache(_MOST_CACHED)
        self._changes = 0
        self._waiting: dict[BlockKey | None, tuple[list[_Change], asyncio.Task[None]]] = {}
        # Writers of this process take turns; between processes the conditions of the writes decide.
        self._locks = [asyncio.Lock() for _ in range(_LOCKS)]

    async def get(self, parent: BlockKey | None) -> list[Child]:
        """Returns the listed children of `parent`, those listed last at the end.

        Raises:
            BackendUnavailable: the list cannot be read.
        """
        remembered = self._cache.get(parent)
        if remembered is not None:
            return remembered
        changes = self._changes
        children, _ = await self._lane.run(lambda: self._read(parent))
        if changes == self._changes:
            ttl = (
                self._bucket.settings.lookup_ttl_s if children else self._bucket.settings.miss_ttl_s
            )
            weight = max(_LEAST_WEIGHT, sum(one.tokens.nbytes for one in children) >> 10)
            self._cache.put(parent, children, ttl, weight)
        return children

    async def list_new(self, objects: Iterable[Sequence[StoredBlock]]) -> None:
        """Lists the blocks of each object whose parent is not in it; logs a warning on failure."""
        listed: defaultdict[BlockKey | None, list[Child]] = defaultdict(list)
        for one in objects:
            inside = {block.key for block in one}
            for block in one:
                if block.tokens is not None and block.parent not in inside:
                    listed[block.parent].append(Child(block.key, block.tokens))
        await _ended([self._add(parent, children) for parent, children in listed.items()])

    async def unlist(self, members: Iterable[Member]) -> None:
        """Removes `members` from the lists.

        Raises:
            BackendUnavailable: a list could not be changed; others may be.
        """
        listed: defaultdict[BlockKey | None, set[BlockKey]] = defaultdict(set)
        for one in members:
            if one.metadata.tokens is not None:
                listed[one.metadata.parent].add(one.key)
        changes = [self._discard(parent, keys) for parent, keys in listed.items()]
        results_of(await settled([asyncio.ensure_future(change) for change in changes]))

    async def _add(self, parent: BlockKey | None, new: Sequence[Child]) -> None:
        keys = {child.key for child in new}

        def extended(old: list[Child]) -> list[Child]:
            if keys <= {child.key for child in old}:
                return old
            return [*(child for child in old if child.key not in keys), *new][-MAX_CHILDREN:]

        await self._change(parent, extended)

    async def _discard(self, parent: BlockKey | None, keys: Collection[BlockKey]) -> None:
        def reduced(old: list[Child]) -> list[Child]:
            if not any(child.key in keys for child in old):
                return old
            return [child for child in old if child.key not in keys]

        await self._change(parent, reduced)

    async def _change(self, parent: BlockKey | None, change: _Change) -> None:
        # Changes that arrive during a write of this list are written together.
        waiting = self._waiting.get(parent)
        if waiting is None:
            changes: list[_Change] = []
            task = asyncio.get_running_loop().create_task(self._change_all(parent, changes))
            waiting = self._waiting[parent] = changes, task
        waiting[0].append(change)
        ended = await settled([waiting[1]])
        results_of(ended)

    async def _change_all(self, parent: BlockKey | None, changes: list[_Change]) -> None:
        lock = self._locks[0 if parent is None else parent[0] % _LOCKS]
        async with lock:
            del self._waiting[parent]
            try:
                await self._lane.run(lambda: self._rewrite(parent, changes))
            finally:
                self._changes += 1
                self._cache.drop(parent)

    # ------------------------------------------------------------------ on threads

    def _rewrite(self, parent: BlockKey | None, changes: Sequence[_Change]) -> None:
        for attempt in range(_TRIES):
            old, etag = self._read(parent)
            new = reduce(lambda children, change: change(children), changes, old)
            if new is old and (old or not etag):  # a damaged list is removed: it may have tokens
                return
            if not new:
                # The object's name has the parent's key. A block that is listed meanwhile is lost
                # from the list.
                self._bucket.remove(self._name(parent))
                return
            try:
                record = pack({"children": [child_to_json(child) for child in new]})
                self._bucket.put(self._name(parent), [record], replaces=etag)
                return
            except Conflict:
                time.sleep(random.uniform(0, _PAUSE_S * 2**attempt))
        raise BackendUnavailable(f"{self._bucket.settings}: others keep changing a list of tails")

    def _read(self, parent: BlockKey | None) -> tuple[list[Child], str]:
        fetched = self._bucket.fetch(self._name(parent), _MOST_NBYTES)
        if fetched is None:
            return [], ""
        try:
            return _decode(fetched.data), fetched.etag
        except BadRecord:
            return [], fetched.etag

    def _name(self, parent: BlockKey | None) -> str:
        return self._bucket.settings.name("c", "none" if parent is None else parent.hex())


async def _ended(changes: Sequence[Coroutine[Any, Any, None]]) -> None:
    for result in await settled([asyncio.ensure_future(change) for change in changes]):
        if isinstance(result, BackendUnavailable):
            # The blocks themselves are stored: only short prompts are not found in them.
            warn_once("s3.children", str(result))
        elif isinstance(result, BaseException):
            raise result


def _decode(data: bytes) -> list[Child]:
    try:
        listed: list[dict[str, Any]] = unpack(data)["children"]
        return [child_from_json(child) for child in listed][-MAX_CHILDREN:]
    except DAMAGED as error:
        raise BadRecord(f"not a list of children: {error!r}") from error
