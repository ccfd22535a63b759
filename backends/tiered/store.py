"""``tiered:``: several stores as one, the fastest first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from kvconnect import frame
from kvconnect.backend import (
    MAX_CHILDREN,
    Access,
    Backend,
    Capabilities,
    Child,
    StoredBlock,
    StoredEntry,
)
from kvconnect.backends.guard.calls import raise_any
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.tiered.find import TierLookups
from kvconnect.backends.tiered.settings import TieredSettings, parse_tiered
from kvconnect.backends.tiered.tier import Tier
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import BackendTimeout, BackendUnavailable, BadFrame, ConfigurationError
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import count, warn_once

__all__ = ["TieredBackend", "from_url"]

T = TypeVar("T")


def from_url(url: StoreUrl) -> TieredBackend:
    """``tiered:?tiers=memory:%3Fcapacity=4GiB,disk:/var/kv,redis://host&write=through,behind``."""
    from kvconnect.backends.registry import open_backend

    tiers, settings = parse_tiered(url)
    made = [open_backend(tier, raw=True) for tier in tiers]
    return TieredBackend(made, settings, names=[StoreUrl.parse(tier).scheme for tier in tiers])


class TieredBackend(Backend):
    """An ordered list of stores, the fastest first, that are looked up, loaded and saved as one.

    A prefix may come from several tiers: each piece of it is loaded from the first tier that has
    it, and copied to the faster ones in the background. A tier that is dead or slow is skipped, and
    asked again in the background until it answers. A bad frame is deleted in the tier it came from
    and loaded from the next.

    Args:
        tiers: stores that are not open yet; a guard around one is replaced by the tier's own.
        settings: how they are used.
        names: of the tiers, for messages and `stats`; default: their classes'.
    """

    capabilities = Capabilities(checks_frames=True)

    def __init__(
        self,
        tiers: Sequence[Backend],
        settings: TieredSettings | None = None,
        *,
        names: Sequence[str] = (),
    ) -> None:
        places = [tier.place if isinstance(tier, GuardedBackend) else "" for tier in tiers]
        stores = [tier.inner if isinstance(tier, GuardedBackend) else tier for tier in tiers]
        if any(store.capabilities.device_buffers for store in stores):
            raise ConfigurationError("tiers: a store of device buffers cannot be a tier")
        self._settings = settings = settings or TieredSettings()
        writes = settings.write_of_each(len(stores))
        names = names or [_short_name(store) for store in stores]
        self.tiers = tuple(
            Tier(store, name, settings, write=write, place=place or name)
            for store, name, write, place in zip(
                stores, _unique(names), writes, places, strict=True
            )
        )
        self._decisive = _decisive(self.tiers)
        self._declare()
        self._lookups = TierLookups(self.tiers, settings.patience_s)
        self._promotes = settings.promote
        self._is_open = False

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Open all tiers at once; those that cannot be reached now are opened in the background.

        Unless it is to be a store, no block is copied to another tier.

        Raises:
            ConfigurationError: of the first tier that is configured wrongly.
            BackendUnavailable: no tier that saves wait for can be reached.
        """
        self._promotes = self._settings.promote and access == "store"
        # A tier that hangs is given up in time for the others.
        for tier in self.tiers:
            tier.guard.deadline_s = min(tier.guard.deadline_s, self.deadline_s / 2)
        try:
            opened = await asyncio.gather(
                *(tier.open(layouts, access) for tier in self.tiers), return_exceptions=True
            )
            self._declare()
            self._check_opened(opened)
        except BaseException:
            await asyncio.gather(*(tier.abort() for tier in self.tiers))
            raise
        self._is_open = True

    async def close(self) -> None:
        """Write what waits, for some seconds; close all tiers at once."""
        self._is_open = False
        self._lookups.close()
        await asyncio.gather(*(tier.close() for tier in self.tiers))

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` are present, each in any tier.

        Ends as soon as a tier has all, and at the latest after the patience that tiers are given.
        """
        self._opened()
        return await self._lookups.count(keys)

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fill `into`, each piece from the first tier that has it.

        Raises:
            BackendTimeout: a tier holds `into` beyond its deadline, until `pending` is done.
        """
        self._opened()
        loaded = 0
        promotions: list[asyncio.Task[None]] = []
        bad: set[BlockKey] = set()
        try:
            progress = True
            while progress and loaded < len(keys):
                progress = False
                # A slow tier comes last: what is in another need not wait for it.
                for tier in sorted(self.tiers, key=lambda tier: not tier.prompt):
                    rest = slice(loaded, None)
                    got = await tier.load(keys[rest], into[rest], bad)
                    if got:
                        piece = slice(loaded, loaded + got)
                        promotions += self._promotion(tier, keys[piece], into[piece])
                        loaded += got
                        progress = True
                    if loaded == len(keys):
                        break
        finally:
            # They read `into`, which is handed on then. What becomes of them is not the load's.
            for error in await asyncio.gather(*promotions, return_exceptions=True):
                if error is not None:
                    warn_once("tiered.promotion", f"loaded blocks were not copied: {error!r}")
            for _ in bad:  # once, however many tiers had a bad copy
                count("store.bad_frame")
        return loaded

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Store `blocks` in all tiers; wait for those that are written through.

        Returns:
            How many leading ones are stored: in a durable tier if one is written through, else in a
            shared one, else in any.

        Raises:
            BackendTimeout: a tier holds the data beyond its deadline, until `pending` is done.
        """
        self._opened()
        through = [tier for tier in self.tiers if tier.write == "through"]
        behind = [tier for tier in self.tiers if tier.write == "behind"]
        results = await asyncio.gather(
            *(tier.save(blocks) for tier in through),
            *(tier.backlog.add(blocks) for tier in behind),
            return_exceptions=True,
        )
        raise_any(results)
        stored = dict(zip(through, results, strict=False))
        return max(int(stored[tier]) for tier in self._decisive)  # type: ignore[arg-type]

    async def delete(self, keys: Sequence[BlockKey]) -> None:
        """Forget `keys` in every tier, also where they wait to be written.

        A tier that does not answer now forgets them when it does, if this is open until then.

        Raises:
            BackendUnavailable: no tier could delete anything.
        """
        self._opened()
        deleted = await asyncio.gather(*(tier.delete(keys) for tier in self.tiers))
        if not any(deleted):
            raise BackendUnavailable("tiered store: no tier could delete")

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """The stored blocks whose parent is `key`, of all tiers that answer soon."""
        listing = [
            tier for tier in self.tiers if tier.prompt and tier.guard.capabilities.enumerable
        ]
        tasks = [asyncio.create_task(_quietly(tier.guard.children(key), ())) for tier in listing]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self._settings.patience_s)
            for task in late:
                task.cancel()
        found: dict[BlockKey, Child] = {}
        for task in tasks:
            if task.done() and not task.cancelled():
                for child in task.result():
                    found.setdefault(child.key, child)
        return list(found.values())[:MAX_CHILDREN]

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Everything in the tiers that tell; a block in several is listed as the first has it."""
        # A part of each key is enough to know it again, and takes less memory.
        seen: set[bytes] = set()
        for tier in self.tiers:
            if not (tier.alive and tier.guard.capabilities.enumerable):
                continue
            async for entry in tier.guard.scan():
                short = entry.key[:12]
                if short not in seen:
                    seen.add(short)
                    yield entry

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """What the first tier that knows it says of each of `keys`."""
        found: list[StoredEntry | None] = [None] * len(keys)
        for tier in self.tiers:
            missing = [at for at, entry in enumerate(found) if entry is None]
            if missing and tier.alive:
                entries = await _quietly(tier.guard.describe([keys[at] for at in missing]), ())
                for at, entry in zip(missing, entries, strict=False):
                    found[at] = entry
        return found

    async def stats(self) -> dict[str, float]:
        """Each tier's numbers as ``<tier>.<name>``; ``blocks``, ``bytes``: of the fullest tier.

        Also ``<tier>.alive``, and ``<tier>.waiting`` blocks to be written in the background.
        """
        numbers: dict[str, float] = {"blocks": 0, "bytes": 0}
        for tier in self.tiers:
            own = await _quietly(tier.guard.stats(), {}) if tier.alive else {}
            numbers |= {f"{tier.name}.{name}": value for name, value in own.items()}
            numbers[f"{tier.name}.alive"] = tier.alive
            numbers[f"{tier.name}.waiting"] = len(tier.backlog)
            for name in ("blocks", "bytes"):
                numbers[name] = max(numbers[name], own.get(name, 0))
        return numbers

    def parts(self) -> Mapping[str, Backend]:
        """The tiers that answer."""
        return {tier.name: tier.guard for tier in self.tiers if tier.alive}

    def register(self, region: Tensor) -> None:
        """Tell all tiers of memory that buffers will come from."""
        for tier in self.tiers:
            tier.guard.register(region)

    async def pin(self, keys: Sequence[BlockKey], ttl: float) -> int:
        """Keep `keys` in every tier; how many leading ones the best of them keeps."""
        alive = [tier for tier in self.tiers if tier.alive]
        kept = await asyncio.gather(*(_quietly(tier.guard.pin(keys, ttl), 0) for tier in alive))
        return max(kept, default=0)

    # ---------------------------------------------------------------- inside

    def _opened(self) -> None:
        if not self._is_open:
            raise BackendUnavailable("tiered store: is not open")

    def _check_opened(self, opened: Sequence[BackendUnavailable | BaseException | None]) -> None:
        for tier, error in zip(self.tiers, opened, strict=True):
            if isinstance(error, ConfigurationError):
                raise ConfigurationError(f"tier {tier.name}: {error}") from error
            if isinstance(error, BaseException) and not isinstance(error, BackendUnavailable):
                raise error
        if not any(tier.alive for tier in self.tiers if tier.write == "through"):
            reasons = "; ".join(str(error) for error in opened if error is not None)
            raise BackendUnavailable(f"tiered store: no tier can be reached: {reasons}")

    def _declare(self) -> None:
        # What holds whichever tier a block is in, or comes from.
        every = [tier.guard.capabilities for tier in self.tiers]
        decisive = [tier.guard.capabilities for tier in self._decisive]
        limits = [one.max_value_bytes for one in decisive]
        bounded = [limit for limit in limits if limit is not None]
        self.capabilities = replace(
            self.capabilities,
            enumerable=all(one.enumerable for one in every),
            inline=all(one.inline for one in every),
            expires=all(one.expires for one in every),
            variable_length=all(one.variable_length for one in every),
            durable=all(one.durable for one in decisive),
            shared=all(one.shared for one in decisive),
            max_value_bytes=max(bounded) if len(bounded) == len(limits) else None,
            checks_frames=self.capabilities.checks_frames
            and all(tier.verify_frames for tier in self.tiers),
        )

    def _promotion(
        self, source: Tier, keys: Sequence[BlockKey], frames: Sequence[Tensor]
    ) -> Iterator[asyncio.Task[None]]:
        count(f"store.tiered.loaded.{source.name}", blocks=len(keys))
        faster = [tier for tier in self.tiers[: self.tiers.index(source)] if tier.alive]
        if faster and self._promotes:
            yield asyncio.create_task(_promote(source.guard, faster, keys, frames))


async def _promote(
    source: GuardedBackend,
    faster: Sequence[Tier],
    keys: Sequence[BlockKey],
    frames: Sequence[Tensor],
) -> None:
    """Have `faster` written in the background; `frames` may be handed on when this returns."""
    known = await _quietly(source.describe(keys), [None] * len(keys))
    blocks = []
    for key, data, entry in zip(keys, frames, known, strict=True):
        if entry is not None:
            blocks.append(entry.block(data[: entry.nbytes]))
        elif not source.capabilities.variable_length:
            blocks.append(StoredBlock(key, data))
        else:
            with suppress(BadFrame):  # no frame: nothing says how long the value is
                blocks.append(StoredBlock(key, frame.whole(data)))
    await asyncio.gather(*(tier.backlog.add(blocks) for tier in faster))


def _decisive(tiers: Sequence[Tier]) -> list[Tier]:
    """The tiers that decide whether a save was one: what the whole promises, these must keep."""
    through = [tier for tier in tiers if tier.write == "through"]
    tests: tuple[Callable[[Capabilities], bool], ...] = (
        lambda can: can.durable and can.shared,
        lambda can: can.durable,
        lambda can: can.shared,
    )
    for test in tests:
        keeping = [tier for tier in through if test(tier.guard.capabilities)]
        if keeping:
            return keeping
    return through


async def _quietly(call: Coroutine[Any, Any, T], otherwise: T) -> T:
    """The result of `call`, or `otherwise` if the store fails: what is asked for is optional."""
    try:
        return await call
    except (BackendUnavailable, BackendTimeout):
        return otherwise


def _short_name(store: Backend) -> str:
    return type(store).__name__.removesuffix("Backend").lower() or "tier"


def _unique(names: Sequence[str]) -> list[str]:
    return [
        f"{name}{names[:at].count(name) + 1}" if name in names[:at] else name
        for at, name in enumerate(names)
    ]
