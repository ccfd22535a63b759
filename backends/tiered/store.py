"""The ``tiered:`` backend: several stores as one, the fastest first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvconnect.backend import Access, Backend, Capabilities, Child, StoredBlock, StoredEntry
from kvconnect.backends.guard.calls import raise_any
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.tiered.find import TieredFinder
from kvconnect.backends.tiered.load import load
from kvconnect.backends.tiered.settings import TieredSettings, parse_tiered
from kvconnect.backends.tiered.tier import Tier
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.keys import BlockKey
from kvconnect.layout import KvCacheLayout

if TYPE_CHECKING:
    from torch import Tensor


def from_url(url: StoreUrl) -> TieredBackend:
    """Parses ``tiered:?tiers=memory:%3Fcapacity=4GiB,disk:/var/kv&write=through,behind``."""
    from kvconnect.backends.registry import open_backend

    tiers, settings = parse_tiered(url)
    made = [open_backend(tier, raw=True) for tier in tiers]
    return TieredBackend(made, settings, names=[StoreUrl.parse(tier).scheme for tier in tiers])


class TieredBackend(Backend):
    """An ordered list of stores, the fastest first, that are looked up, loaded and saved as one.

    A prefix may come from several tiers: each piece of it is loaded from the first tier that has
    it, and copied to the faster ones in the background. A tier that fails or is slow is skipped,
    and probed in the background until it answers. A damaged frame is deleted in its tier and loaded
    from the next one.

    Args:
        tiers: unopened stores; the tier's own guard replaces a guard around one.
        settings: the settings of the whole.
        names: the names of the tiers, for messages and `stats`; by default their class names.
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
        self.capabilities = _capabilities_of(self.capabilities, self.tiers)
        self._finder = TieredFinder(self.tiers, settings.patience_s)
        self._promotes = False
        self._dropped: dict[int, set[BlockKey]] = {}  # the keys deleted during each load
        self._is_open = False

    async def open(self, layouts: Sequence[KvCacheLayout], access: Access = "store") -> None:
        """Opens all tiers at once; those that cannot be reached now are opened in the background.

        With another `access` than ``store`` no block is copied to another tier.

        Raises:
            ConfigurationError: a tier is configured wrongly.
            BackendUnavailable: no tier with ``through`` can be reached.
        """
        self._promotes = self._settings.promote and access == "store"
        # The deadline of a tier is earlier than that of the call to the tiered store.
        for tier in self.tiers:
            tier.guard.deadline_s = min(tier.guard.deadline_s, self.deadline_s / 2)
        try:
            opened = await asyncio.gather(
                *(tier.open(layouts, access) for tier in self.tiers), return_exceptions=True
            )
            self.capabilities = _capabilities_of(self.capabilities, self.tiers)
            self._check_opened(opened)
        except BaseException:
            await asyncio.gather(*(tier.abort() for tier in self.tiers))
            raise
        self._is_open = True

    async def close(self) -> None:
        """Writes waiting blocks, for some seconds; closes all tiers at once."""
        self._is_open = False
        self._finder.close()
        await asyncio.gather(*(tier.close() for tier in self.tiers))

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are present, each in any tier.

        Returns as soon as a tier has all keys, and at the latest after twice ``patience_s``.
        """
        self._opened()
        return await self._finder.lookup(keys)

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fills `into`, each piece from the first tier that has it.

        Raises:
            BackendTimeout: a tier holds `into` beyond its deadline, until `pending` is done.
        """
        self._opened()
        dropped: set[BlockKey] = set()
        self._dropped[id(dropped)] = dropped
        try:
            return await load(self.tiers, keys, into, promotes=self._promotes, dropped=dropped)
        finally:
            del self._dropped[id(dropped)]

    async def save(self, blocks: Sequence[StoredBlock]) -> int:
        """Stores `blocks` in all tiers; waits for those that are written through.

        Returns:
            The number of leading blocks that are stored: in a durable tier with ``through`` if
            there is one, else in a shared one, else in any.

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
        """Deletes `keys` in every tier, and drops those that wait to be written.

        A tier that does not answer now deletes them later, if the store is still open then.

        Raises:
            BackendUnavailable: no tier could delete; call it again once a tier answers.
        """
        self._opened()
        for dropped in self._dropped.values():
            dropped.update(keys)
        deleted = await asyncio.gather(*(tier.delete(keys) for tier in self.tiers))
        if not any(deleted):
            raise BackendUnavailable(
                "tiered store: no tier could delete; drop it again once a tier answers"
            )

    async def children(self, key: BlockKey | None) -> Sequence[Child]:
        """Returns the stored blocks whose parent is `key`, of all tiers that answer in time."""
        return await self._finder.children(key)

    async def scan(self) -> AsyncIterator[StoredEntry]:
        """Yields the entries of all tiers that list them; a block only from its first tier."""
        async for entry in self._finder.scan():
            yield entry

    async def describe(self, keys: Sequence[BlockKey]) -> Sequence[StoredEntry | None]:
        """Returns the entry of each of `keys` in the first tier that has one."""
        return await self._finder.describe(keys)

    async def pin(self, keys: Sequence[BlockKey], until: float | None) -> Sequence[bool]:
        """Pins or unpins `keys` in every tier that has pins and answers; see `Backend.pin`.

        Each tier pins within the share of its own capacity. A key is pinned if any tier pins it. A
        tier that refuses, since its server may drop pinned blocks, is passed over.

        Raises:
            ConfigurationError: no tier has pins, or each of them refuses.
            BackendUnavailable: no tier that has pins answers.
        """
        self._opened()
        pinning = [tier for tier in self.tiers if tier.guard.capabilities.pins]
        if not pinning:
            return await super().pin(keys, until)
        refusals: list[ConfigurationError] = []

        async def asked(tier: Tier) -> Sequence[bool] | None:
            try:
                return await tier.guard.pin(keys, until)
            except ConfigurationError as error:
                refusals.append(error)
                return None

        calls = (tier.answer(asked(tier), None) for tier in pinning if tier.alive)
        answers = [answer for answer in await asyncio.gather(*calls) if answer is not None]
        if not answers:
            if refusals:
                raise refusals[0]
            raise BackendUnavailable(
                "tiered store: no tier with pins answers; try again once one does"
            )
        return [any(of_key) for of_key in zip(*answers, strict=True)]

    async def scrub(self) -> bool:
        """Overwrites some bytes of dropped blocks in the tiers that answer; see `Backend.scrub`."""
        self._opened()
        default = False
        calls = (tier.answer(tier.guard.scrub(), default) for tier in self.tiers if tier.alive)
        return any(await asyncio.gather(*calls))

    async def stats(self) -> dict[str, float]:
        """Returns each tier's numbers as ``<tier>.<name>``, and the largest of some numbers.

        These are ``blocks`` and ``bytes``, and those of pinned blocks if a tier has pins. Each tier
        also has ``<tier>.alive``, and ``<tier>.waiting``: blocks to be written in the background.
        """
        greatest = ["blocks", "bytes"]
        if any(tier.guard.capabilities.pins for tier in self.tiers):
            greatest += ["pinned_blocks", "pinned_bytes"]
        numbers: dict[str, float] = dict.fromkeys(greatest, 0)
        for tier in self.tiers:
            own = await tier.answer(tier.guard.stats(), {}) if tier.alive else {}
            numbers |= {f"{tier.name}.{name}": value for name, value in own.items()}
            numbers[f"{tier.name}.alive"] = tier.alive
            numbers[f"{tier.name}.waiting"] = len(tier.backlog)
            for name in greatest:
                numbers[name] = max(numbers[name], own.get(name, 0))
        return numbers

    def parts(self) -> Mapping[str, Backend]:
        """Returns the tiers that answer."""
        return {tier.name: tier.guard for tier in self.tiers if tier.alive}

    def register(self, region: Tensor) -> None:
        """Registers memory that buffers will come from with all tiers."""
        for tier in self.tiers:
            tier.guard.register(region)

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


def _short_name(store: Backend) -> str:
    return type(store).__name__.removesuffix("Backend").lower() or "tier"


def _unique(names: Sequence[str]) -> list[str]:
    return [
        f"{name}{names[:at].count(name) + 1}" if name in names[:at] else name
        for at, name in enumerate(names)
    ]


def _capabilities_of(own: Capabilities, tiers: Sequence[Tier]) -> Capabilities:
    """Returns `own`, limited to the capabilities that all of `tiers` with blocks share."""
    every = [tier.guard.capabilities for tier in tiers]
    deciding = [tier.guard.capabilities for tier in _decisive(tiers)]
    limits = [one.max_value_bytes for one in deciding]
    bounded = [limit for limit in limits if limit is not None]
    return replace(
        own,
        enumerable=all(one.enumerable for one in every),
        inline=all(one.inline for one in every),
        expires=all(one.expires for one in every),
        expires_each=all(one.expires_each for one in every),
        pins=any(one.pins for one in every),
        variable_length=all(one.variable_length for one in every),
        durable=all(one.durable for one in deciding),
        shared=all(one.shared for one in deciding),
        max_value_bytes=max(bounded) if len(bounded) == len(limits) else None,
        checks_frames=own.checks_frames and all(tier.verify_frames for tier in tiers),
    )


def _decisive(tiers: Sequence[Tier]) -> list[Tier]:
    """Returns the tiers, written through, that decide whether a save succeeded.

    These are the durable and shared ones; if there are none, the durable ones, else the shared
    ones, else all.
    """
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
