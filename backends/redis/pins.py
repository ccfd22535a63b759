"""The pins of blocks in Redis: a hash of them, and no expiry of what they keep.

A server that drops keys for room drops either any of them, ``allkeys-*``: then it can promise no
pins; or only those that expire, ``volatile-*``; or none, ``noeviction``. So a pinned block has no
expiry while it is pinned, and its pin says when it expires after that.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import inf

from kvconnect.backends.redis.commands import Ask, about, of_another_type, sound
from kvconnect.backends.redis.find import RedisFinder
from kvconnect.backends.redis.format import Head, Pin
from kvconnect.backends.redis.router import RedisRouter
from kvconnect.backends.redis.server import room_of
from kvconnect.backends.redis.settings import Mode
from kvconnect.backends.redis.wire import Reply
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.keys import KEY_NBYTES, BlockKey
from kvconnect.trace import warn_once

_PAGE = 512
_SWEEP_S = 60.0
# Parts outlive what names them, as they do when they are saved.
_PART_SLACK_MS = 60_000


class RedisPins:
    """Pins and unpins blocks. Belongs to the event loop.

    The pins are in the server, for all processes. A block that was pinned beyond its expiry is not
    found from the end of its pin on, in a cluster from the next `sweep` on. Its bytes are freed
    when any process that may write calls that.
    """

    def __init__(self, router: RedisRouter, finder: RedisFinder) -> None:
        self._router = router
        self._finder = finder
        self._name = router.names.pins
        self._swept_at = 0.0

    async def pin(self, keys: Sequence[BlockKey], until: float | None) -> list[bool]:
        """Pins or unpins `keys`; see `Backend.pin`.

        Raises:
            ConfigurationError: a server may drop pinned blocks, or does not say whether it does.
            BackendUnavailable: a server fails; some of `keys` may be pinned.
        """
        if until is None:
            return await self._unpin(keys)
        limit = await self._limit()
        if not keys:
            return []
        await self.sweep()
        wanted = list(dict.fromkeys(keys))
        heads = await self._heads(wanted)
        pins = await self._claim(heads, until, limit)
        await self._router.answers(
            [about(b"PERSIST", name) for name in await self._values(list(pins))]
        )
        # Those that were dropped or expired meanwhile, before they were made to stay.
        gone = pins.keys() - (await self._heads(list(pins))).keys()
        await self._forget(gone)
        return [key in pins and key not in gone for key in keys]

    async def sweep(self) -> None:
        """Ends the pins whose time is over, and forgets those of blocks that are gone."""
        self._swept_at = time.time()
        pins = await self._all()
        over = {key: pin for key, pin in pins.items() if pin.until <= time.time()}
        await self._release(over)
        left = [key for key in pins if key not in over]
        await self._forget(set(left) - await self._there(left))

    async def end_outlived(self, keys: Sequence[BlockKey]) -> None:
        """Deletes those of `keys` that were pinned beyond their expiry, and whose pins are over.

        Without it, a save would find them stored. A failure has no effect. Nor has it one in a
        cluster, where no save may wait for the one node with the pins.
        """
        if self._router.settings.mode is Mode.CLUSTER:
            return
        with suppress(BackendUnavailable):
            pins = await self._of(keys)
            await self._finder.delete([key for key, pin in pins.items() if pin.has_outlived])

    async def sweep_when_due(self) -> None:
        """Sweeps if this process has not for a minute; a failure is only logged."""
        # By the clock that pins end by; it may have been set back.
        if abs(time.time() - self._swept_at) < _SWEEP_S:
            return
        try:
            await self.sweep()
        except BackendUnavailable as error:
            warn_once("redis.pins", f"pins whose time is over stay: {error}")

    async def totals(self) -> dict[str, float]:
        """Returns the number and bytes of pinned blocks; changes nothing."""
        pins = {key: pin for key, pin in (await self._all()).items() if pin.until > time.time()}
        there = await self._there(list(pins))
        return {
            "pinned_blocks": len(there),
            "pinned_bytes": sum(pins[key].nbytes for key in there),
        }

    # ---------------------------------------------------------------- inside

    async def _limit(self) -> float:
        """Returns the bytes that pinned blocks may take; ``inf``: a server has no limit."""
        await self._router.refresh()
        rooms = await self._router.everywhere(room_of)
        for room in rooms:
            if not room.policy:
                raise ConfigurationError(
                    f"Redis at {room.server}: does not report its maxmemory-policy, so no pins can "
                    "be promised; allow the user +info"
                )
            if room.maxmemory and room.policy.startswith("allkeys"):
                raise ConfigurationError(
                    f"Redis at {room.server}: with maxmemory-policy {room.policy} it drops any key "
                    "for room, so that no pins can be promised; set volatile-lru, and ttl= in the "
                    "store's URL, or noeviction"
                )
        if not all(room.maxmemory for room in rooms):
            return inf
        return self._router.settings.pin_fraction * sum(room.maxmemory for room in rooms)

    async def _claim(
        self, heads: Mapping[BlockKey, Head], until: float, limit: float
    ) -> dict[BlockKey, Pin]:
        """Records pins of blocks in their order, as far as there is room; returns them."""
        known = await self._all()
        used = sum(pin.nbytes for pin in known.values())
        expiries = await self._expiries(list(heads))
        pins: dict[BlockKey, Pin] = {}
        added: list[BlockKey] = []
        full = False
        for key, head in heads.items():
            if (before := known.get(key)) is not None:
                expires = expiries[key] or before.expires_at_ms
                pins[key] = before._replace(until=until, expires_at_ms=expires)
                continue
            full = full or used + head.stored_nbytes > limit
            if not full:
                used += head.stored_nbytes
                added.append(key)
                pins[key] = Pin(until, head.stored_nbytes, expiries[key])
        await self._record(pins)
        # Another process may have pinned at the same time: both withdraw then, rather than none.
        if added and limit < inf:
            total = sum(pin.nbytes for pin in (await self._all()).values())
            withdrawn: list[BlockKey] = []
            while total > limit and added:
                total -= pins[added[-1]].nbytes
                withdrawn.append(added.pop())
            await self._forget(withdrawn)
            for key in withdrawn:
                del pins[key]
        return pins

    async def _unpin(self, keys: Sequence[BlockKey]) -> list[bool]:
        pins = await self._of(keys)
        there = await self._there(list(pins))
        now = time.time()
        await self._release(pins)
        return [key in there and pins[key].until > now for key in keys]

    async def _of(self, keys: Sequence[BlockKey]) -> dict[BlockKey, Pin]:
        """Returns the pins of `keys`, also those whose time is over."""
        pins: dict[BlockKey, Pin] = {}
        for start in range(0, len(keys), _PAGE):
            piece = keys[start : start + _PAGE]
            (found,) = await self._answers([about(b"HMGET", self._name, *piece)])
            values = found if isinstance(found, list) else []
            pairs = zip(piece, map(Pin.parse, values), strict=False)
            pins |= {key: pin for key, pin in pairs if pin is not None}
        return pins

    async def _release(self, pins: Mapping[BlockKey, Pin]) -> None:
        """Lets the blocks of `pins` expire again, and forgets the pins after that."""
        ends = {key: pin.expires_at_ms for key, pin in pins.items() if pin.expires_at_ms}
        names = self._router.names
        _, parts = await self._finder.heads(list(ends))
        order = list(ends)
        await self._router.answers(
            [
                *(about(b"PEXPIREAT", names.block(key), end) for key, end in ends.items()),
                *(
                    about(b"PEXPIREAT", name, ends[order[number]] + _PART_SLACK_MS)
                    for number, name in parts
                ),
            ]
        )
        await self._forget(pins)

    async def _heads(self, keys: Sequence[BlockKey]) -> dict[BlockKey, Head]:
        states = await self._finder.states(keys)
        pairs = zip(keys, states, strict=True)
        return {key: state for key, state in pairs if isinstance(state, Head)}

    async def _values(self, keys: Sequence[BlockKey]) -> list[bytes]:
        """Returns the names of all values of `keys`: the parts first, which a reader needs."""
        _, parts = await self._finder.heads(keys)
        return [*(name for _, name in parts), *map(self._router.names.block, keys)]

    async def _expiries(self, keys: Sequence[BlockKey]) -> dict[BlockKey, int]:
        """Returns the Unix milliseconds at which blocks expire; 0: never."""
        replies = await self._router.answers(
            [about(b"PTTL", self._router.names.block(key)) for key in keys]
        )
        now = time.time() * 1e3
        lefts = (left if isinstance(left, int) else 0 for left in replies)
        return {
            key: round(now + left) if left > 0 else 0 for key, left in zip(keys, lefts, strict=True)
        }

    async def _there(self, keys: Sequence[BlockKey]) -> set[BlockKey]:
        names = self._router.names
        replies = await self._router.look([about(b"EXISTS", names.block(key)) for key in keys])
        return {key for key, reply in zip(keys, replies, strict=True) if sound(reply)}

    async def _all(self) -> dict[BlockKey, Pin]:
        """Returns all pins, also those whose time is over or whose blocks are gone."""
        pins: dict[BlockKey, Pin] = {}
        cursor, given = b"0", set[bytes]()
        while True:
            (reply,) = await self._answers([about(b"HSCAN", self._name, cursor, b"COUNT", _PAGE)])
            match reply:
                case None:
                    return {}
                case [bytes() as cursor, list() as fields]:
                    pairs = zip(fields[::2], map(Pin.parse, fields[1::2]), strict=False)
                    pins |= {
                        BlockKey(key): pin
                        for key, pin in pairs
                        if pin is not None and isinstance(key, bytes) and len(key) == KEY_NBYTES
                    }
                case _:
                    raise BackendUnavailable(f"Redis: {str(reply)[:100]} is no answer to HSCAN")
            if cursor == b"0":
                return pins
            if cursor in given:
                raise BackendUnavailable("Redis: its listing of pins does not end")
            given.add(cursor)

    async def _record(self, pins: Mapping[BlockKey, Pin]) -> None:
        pairs = [(key, pin.pack()) for key, pin in pins.items()]
        pieces = [pairs[start : start + _PAGE] for start in range(0, len(pairs), _PAGE)]
        asks = [
            about(b"HSET", self._name, *(word for pair in one for word in pair)) for one in pieces
        ]
        if None in await self._answers(asks):
            await self._finder.unlink([self._name])
            await self._router.answers(asks)

    async def _forget(self, keys: Collection[BlockKey]) -> None:
        left = list(keys)
        pieces = [left[start : start + _PAGE] for start in range(0, len(left), _PAGE)]
        await self._answers([about(b"HDEL", self._name, *piece) for piece in pieces])

    async def _answers(self, asks: Sequence[Ask]) -> list[Reply]:
        """Returns the answers; ``None`` if the pins' name has a value of another type.

        Raises:
            BackendUnavailable: one of them is another error.
        """
        replies = await self._router.ask(asks)
        return [None if of_another_type(reply) else sound(reply) for reply in replies]
