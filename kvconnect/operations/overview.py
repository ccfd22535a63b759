"""The numbers of a store alone, in the form of those of a server."""

from __future__ import annotations

from collections.abc import Mapping

from kvconnect.backend import Backend
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.url import StoreUrl, parse_size
from kvconnect.operations.visit import parts, visiting
from kvconnect.prometheus.overview import Overview, StoreNumbers


async def store_overview(url: str) -> Overview:
    """Opens the store of `url`, asks each part for its numbers, and closes it. Lists no blocks.

    Raises:
        ConfigurationError: a bad URL, or a store that is always empty from outside.
        BackendUnavailable: the store cannot be reached.
    """
    parsed = StoreUrl.parse(url)
    async with visiting(url, "read") as store:
        of_parts = parts(store)
        found = Overview()
        for name, part in of_parts.items():
            found.stores.append(_numbers(name, part, await part.stats()))
    # A store that is only read applies no capacity, and so reports none.
    capacity = parsed.query.get("capacity")
    if len(found.stores) == 1 and found.stores[0].capacity_bytes is None and capacity is not None:
        found.stores[0].capacity_bytes = parse_size(capacity)
    return found


def _numbers(name: str, part: Backend, stats: Mapping[str, float]) -> StoreNumbers:
    def number(field: str) -> int | None:
        return int(stats[field]) if field in stats else None

    return StoreNumbers(
        name,
        part.place if isinstance(part, GuardedBackend) else "",
        blocks=number("blocks"),
        used_bytes=number("bytes"),
        capacity_bytes=number("capacity"),
        pinned_bytes=number("pinned_bytes"),
    )
