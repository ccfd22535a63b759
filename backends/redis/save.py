"""The saves to Redis: parts first, and last the value with the head, which makes them a block."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import hiredis

from kvconnect.backend import StoredBlock
from kvconnect.backends.entries import BlockMetadata, end_of
from kvconnect.backends.redis.commands import (
    ASKING,
    REFUSALS,
    Outcome,
    Put,
    Redirect,
    Refused,
    Stored,
    about,
    ask,
    head_command,
    redirected,
    sound,
    state_of,
)
from kvconnect.backends.redis.find import RedisChildren, RedisFinder
from kvconnect.backends.redis.format import NONCE_NBYTES, Head
from kvconnect.backends.redis.router import RedisRouter, all_ended
from kvconnect.backends.redis.server import takes_writes
from kvconnect.backends.redis.settings import Address
from kvconnect.backends.redis.wire import Reply, Wire
from kvconnect.frame import FrameChecksum
from kvconnect.keys import BlockKey
from kvconnect.trace import count, warn_once

# Seconds after which the parts of a writer that died expire; also the limit for writing a block.
_ORPHAN_TTL_MS = 600_000
# Seconds that parts outlive the value that refers to them.
_PART_SLACK_MS = 60_000
# The bytes under way: enough that neither side waits for the other, and few enough that a refusal
# wastes little.
_WINDOW_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Writing:
    """A block that is about to be stored.

    Attributes:
        first: the value with the head, which makes it a block.
        parts: the block's other values.
    """

    key: BlockKey
    first: Put
    parts: tuple[Put, ...]

    @property
    def is_kept(self) -> bool:
        """Returns whether the block has no time after which it is gone."""
        return self.first.ttl_ms is None


class RedisWriter:
    """Stores blocks. Belongs to the event loop.

    A server that refuses writes (``maxmemory``, a disk that is full, a replica) stores fewer, with
    one warning. Until it accepts writes again, it is probed before blocks are sent to it.
    """

    def __init__(self, router: RedisRouter, finder: RedisFinder, children: RedisChildren) -> None:
        self._router = router
        self._finder = finder
        self._children = children
        self._refused: dict[Address, str] = {}

    async def save(self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]) -> int:
        """Stores `blocks`, sealed by `checksums` if there are any, and lists them as children.

        Returns:
            The number of leading blocks that are stored now.
        """
        calls: list[Coroutine[Any, Any, Any]] = [self._save(blocks, checksums)]
        if any(block.tokens is not None for block in blocks):
            calls.append(self._children.add(blocks))
        saved: int = (await all_ended(calls))[0]
        return saved

    async def _save(self, blocks: Sequence[StoredBlock], checksums: Sequence[FrameChecksum]) -> int:
        if not blocks:
            return 0
        first: dict[BlockKey, int] = {}
        for number, block in enumerate(blocks):
            first.setdefault(block.key, number)
        if not await self._takes_writes(max(block.data.numel() for block in blocks)):
            return len(await self._finder.leading([block.key for block in blocks]))
        writings = [
            self._writing(blocks[number], checksums[number] if checksums else None)
            for number in first.values()
        ]
        stored: set[BlockKey] = set()
        if single := [one for one in writings if not one.parts]:
            stored |= await self._save_single(single)
        if parted := [one for one in writings if one.parts]:
            stored |= await self._save_parted(parted)
        return next((n for n, block in enumerate(blocks) if block.key not in stored), len(blocks))

    def _writing(self, block: StoredBlock, checksum: FrameChecksum | None) -> _Writing:
        names, view = self._router.names, block.data.numpy().data
        metadata = BlockMetadata.of(block).to_bytes()
        head = Head.of(len(view), len(metadata), secrets.token_bytes(NONCE_NBYTES))
        ttl_ms = self._ttl_ms(block)
        part_ms = _ORPHAN_TTL_MS if ttl_ms is None else ttl_ms + _PART_SLACK_MS
        parts = tuple(
            Put(name, (view[head.part(number)],), part_ms)
            for number, name in enumerate(names.parts(block.key, head), 1)
        )
        first = Put(
            names.block(block.key),
            (head.pack() + metadata, view[head.part(0)]),
            ttl_ms,
            # Another process may have stored it since it was looked for, and pinned it since then:
            # its expiry stays as it is.
            replace=False,
            look_first=not parts,
            checksum=checksum,
        )
        return _Writing(block.key, first, parts)

    def _ttl_ms(self, block: StoredBlock) -> int | None:
        """Returns the time that `block` is kept for: the store's, or its own if that is less."""
        own_s = None if (end := end_of(block)) is None else end - time.time()
        times = [one for one in (self._router.settings.ttl, own_s) if one is not None]
        return max(1, round(min(times) * 1e3)) if times else None

    async def _save_single(self, writings: Sequence[_Writing]) -> set[BlockKey]:
        """Stores `writings` of one value each; returns those that are stored now."""
        stored: set[BlockKey] = set()
        for _ in range(2):  # the second time only damaged ones, after their deletion
            results = await self._send([one.first for one in writings])
            pairs = list(zip(writings, results, strict=True))
            stored |= {one.key for one, r in pairs if r in {Outcome.DONE, Outcome.THERE}}
            broken = [one for one, result in pairs if result is Outcome.BROKEN]
            taken = [one for one, result in pairs if result is Outcome.TAKEN]
            states = await self._finder.states([one.key for one in taken])
            there = [isinstance(state, Head) for state in states]
            stored |= {one.key for one, is_block in zip(taken, there, strict=True) if is_block}
            junk = [one for one, is_block in zip(taken, there, strict=True) if not is_block]
            writings = broken + junk
            if not writings:
                break
            await self._finder.delete([one.key for one in broken])
            await self._finder.unlink([one.first.name for one in junk])
        return stored

    async def _save_parted(self, writings: Sequence[_Writing]) -> set[BlockKey]:
        """Stores `writings` of several values each; returns those that are stored now."""
        keys = [one.key for one in writings]
        pairs = list(zip(writings, await self._finder.states(keys), strict=True))
        await self._finder.delete([one.key for one, s in pairs if s is Outcome.BROKEN])
        stored = {one.key for one, state in pairs if isinstance(state, Head)}
        return stored | await self._write([one for one, s in pairs if not isinstance(s, Head)])

    async def _write(self, writings: Sequence[_Writing]) -> set[BlockKey]:
        """Returns those that are stored: the leading ones, except those that a server refused."""
        whole = await self._write_parts(writings)
        done, there = await self._complete(whole)
        if there:
            keys = [one.key for one in there]
            pairs = list(zip(there, await self._finder.states(keys), strict=True))
            # An empty value would look absent.
            junk = [one for one, state in pairs if not isinstance(state, Head)]
            await self._finder.unlink([one.first.name for one in junk])
            more, _ = await self._complete(junk)
            done += more
            # Another writer was faster: its block is valid, and no head refers to our parts.
            there = [one for one, state in pairs if isinstance(state, Head)]
            await self._unlink_parts(there)
        return {one.key for one in (*there, *await self._keep_parts(done))}

    async def _complete(
        self, writings: Sequence[_Writing]
    ) -> tuple[list[_Writing], list[_Writing]]:
        """Writes the heads of blocks; returns the stored ones, and those that existed already."""
        results = await self._send([one.first for one in writings])
        pairs = list(zip(writings, results, strict=True))
        done = [one for one, result in pairs if result is Outcome.DONE]
        there = [one for one, result in pairs if result is Outcome.THERE]
        refused = [one for one, result in pairs if result not in {Outcome.DONE, Outcome.THERE}]
        await self._unlink_parts(refused)
        return done, there

    async def _write_parts(self, writings: Sequence[_Writing]) -> list[_Writing]:
        """Stores all values but the first; returns those of `writings` that may be completed."""
        puts = [(at, put) for at, one in enumerate(writings) for put in one.parts]
        results = await self._send([put for _, put in puts])
        pairs = zip(puts, results, strict=True)
        missing = {at for (at, _), result in pairs if result is not Outcome.DONE}
        await self._unlink_parts([writings[at] for at in missing])
        return [one for at, one in enumerate(writings) if at < min(missing, default=len(writings))]

    async def _keep_parts(self, writings: Sequence[_Writing]) -> list[_Writing]:
        """Makes parts last as long as what names them; returns those that had all of them."""
        names = [
            (at, part.name) for at, one in enumerate(writings) for part in one.parts if one.is_kept
        ]
        asks = [about(b"PERSIST", name) for _, name in names]
        pairs = zip(names, await self._router.ask(asks), strict=True)
        gone = {at for (at, _), reply in pairs if sound(reply) != 1}
        return [one for at, one in enumerate(writings) if at not in gone]

    async def _unlink_parts(self, writings: Sequence[_Writing]) -> None:
        await self._finder.unlink([part.name for one in writings for part in one.parts])

    async def _takes_writes(self, nbytes: int) -> bool:
        """Returns whether servers that refused a write may accept one of `nbytes` now."""
        if not self._refused:
            return True
        await self._router.refresh()
        for server in self._refused.keys() - set(self._router.topology.servers):
            self._refused.pop(server, None)  # another server has replaced it
        for server, reason in list(self._refused.items()):
            if await self._router.on(server, partial(takes_writes, self._router.names, nbytes)):
                self._refused.pop(server, None)
            elif reason.startswith("READONLY"):
                self._router.topology.suspect()  # until the next master is named
        if self._refused:
            count("redis.refused")
        return not self._refused

    async def _send(self, puts: Sequence[Put]) -> list[Refused | Outcome]:
        """Stores `puts` and returns their results; records servers that refuse writes."""
        results: list[Refused | Outcome] = await self._router.run(put, puts, "store")
        for refusal in results:
            if not isinstance(refusal, Refused) or refusal.server in self._refused:
                continue
            count("redis.refused")
            reason, server = refusal.reason, refusal.server
            warn_once(f"redis.refused {server}", f"Redis at {server} stores nothing now: {reason}")
            self._refused[server] = reason
            if reason.startswith("READONLY"):
                self._router.topology.suspect()
        return results


def put(wire: Wire, puts: Sequence[Put], *, asking: bool = False) -> list[Stored]:
    """Stores `puts` in order; sends none after the first refusal. Blocks.

    Args:
        wire: the connection to the server.
        puts: the values, in order. Existing ones with `look_first` are not sent.
        asking: sends ``ASKING`` before each command, to the server that a slot is moved to.

    Returns:
        The result of each put; ``NOT_TRIED`` if a refusal came before it was sent.

    Raises:
        OSError: the connection is lost, or the server received no byte in time.
        BackendUnavailable: the server answered with another error.

    After an error, any of `puts` may be stored.
    """
    found: list[Stored] = [Outcome.NOT_TRIED] * len(puts)
    looked_for = [number for number, one in enumerate(puts) if one.look_first]
    heads = ask(wire, [head_command(puts[number].name) for number in looked_for], asking=asking)
    for number, reply in zip(looked_for, heads, strict=True):
        found[number] = _found_there(reply)
    waiting: deque[int] = deque()
    under_way = 0
    refused = False

    def settle() -> None:
        nonlocal under_way, refused
        number = waiting.popleft()
        result = _stored(wire, asking=asking)
        taken = result is Outcome.THERE and puts[number].look_first
        found[number] = Outcome.TAKEN if taken else result
        under_way -= puts[number].nbytes
        refused = refused or isinstance(found[number], Refused)

    for number, one in enumerate(puts):
        if refused or found[number] is not Outcome.NOT_TRIED:
            continue
        if one.checksum is not None:
            one.checksum.seal()
        head, tail = one.around()
        wire.send([(ASKING if asking else b"") + head, *one.pieces, tail])
        waiting.append(number)
        under_way += one.nbytes
        while under_way > _WINDOW_NBYTES:
            settle()
    while waiting:
        settle()
    return found


def _found_there(reply: Reply | Redirect) -> Stored:
    if isinstance(reply, Redirect):
        return reply
    state = state_of(reply)
    if isinstance(state, Head):
        # The existence of its other values is not checked here.
        return Outcome.THERE if state.num_parts == 1 else Outcome.BROKEN
    return Outcome.BROKEN if state is Outcome.BROKEN else Outcome.NOT_TRIED


def _stored(wire: Wire, *, asking: bool) -> Stored:
    reply = wire.replies(1 + asking)[-1]
    answer = redirected(reply, wire.server)
    if isinstance(answer, Redirect):
        return answer
    if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(REFUSALS):
        return Refused(str(reply), wire.server)
    return Outcome.THERE if sound(reply) is None else Outcome.DONE
