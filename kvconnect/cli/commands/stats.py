"""The command ``kvconnect stats``: the contents of a store in numbers."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvconnect.backend import StoredEntry
from kvconnect.backends.main_loop import run_to_end
from kvconnect.backends.url import StoreUrl, format_size, parse_size
from kvconnect.cli.command import add_json, add_tenants, add_url
from kvconnect.errors import ConfigurationError
from kvconnect.operations.progress import Progress
from kvconnect.operations.tenants import TenantUse, each_tenant, read_names
from kvconnect.operations.visit import each_block, listed, parts, visiting

_SHOWN = 20
_TENANT = "{:<32}  {:>9}  {:>10}  {:>9}  {:>12}"
_OWN = ("breaker_state", "running", "abandoned")
_SIZES = ("bytes", "file_bytes", "capacity", "pinned_bytes", "used_memory", "maxmemory")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``stats``."""
    parser.description = (
        "What a store says of itself and, where it can list its blocks, how they "
        "are divided between models, namespaces and pool groups."
    )
    add_url(parser)
    parser.add_argument(
        "--by", choices=("tenant",), help="blocks, bytes, hits and tokens saved of each tenant"
    )
    add_tenants(parser, "--by tenant")
    parser.add_argument("--quick", action="store_true", help="do not list the blocks")
    add_json(parser)


def run(arguments: argparse.Namespace) -> None:
    """Prints the numbers.

    Raises:
        ConfigurationError: options exclude each other, or the file of names is invalid.
    """
    if arguments.tenants is not None and arguments.by is None:
        raise ConfigurationError("--tenants: needs --by tenant")
    if arguments.by is None:
        run_to_end(_sum_up(arguments))
        return
    if arguments.quick:
        raise ConfigurationError("--quick: lists no blocks, which --by tenant needs")
    names = {} if arguments.tenants is None else read_names(arguments.tenants)
    run_to_end(_by_tenant(arguments, names))


@dataclass(slots=True)
class _Census:
    """The blocks and bytes of a store, in total and by model, namespace and group."""

    blocks: int = 0
    nbytes: int = 0
    oldest: float | None = None
    last_used: float | None = None
    by: dict[str, tuple[Counter[str], Counter[str]]] = field(
        default_factory=lambda: {
            name: (Counter(), Counter()) for name in ("model", "namespace", "group")
        }
    )

    def add(self, entry: StoredEntry) -> None:
        self.blocks += 1
        self.nbytes += entry.nbytes
        self.oldest = min(entry.created_at, self.oldest or entry.created_at)
        self.last_used = max(entry.used_at, self.last_used or entry.used_at)
        values = (entry.model.hex(), entry.namespace.hex(), str(entry.group))
        for (blocks, nbytes), value in zip(self.by.values(), values, strict=True):
            blocks[value] += 1
            nbytes[value] += entry.nbytes

    def as_json(self) -> dict[str, object]:
        return {
            "blocks": self.blocks,
            "bytes": self.nbytes,
            "oldest": self.oldest,
            "last_used": self.last_used,
            **{
                f"by_{name}": {
                    value: {"blocks": count, "bytes": nbytes[value]}
                    for value, count in blocks.most_common()
                }
                for name, (blocks, nbytes) in self.by.items()
            },
        }


async def _sum_up(arguments: argparse.Namespace) -> None:
    async with visiting(arguments.url, "read") as store:
        numbers = _of_store(await store.stats(), StoreUrl.parse(arguments.url))
        census = None
        if not arguments.quick and any(
            part.capabilities.enumerable for part in parts(store).values()
        ):
            census = _Census()
            total = int(numbers.get("blocks", 0))
            async with Progress("stats", total, "blocks") as progress:
                async for entry in each_block(store, progress):
                    census.add(entry)
    if arguments.json:
        listed = None if census is None else census.as_json()
        print(json.dumps({"store": dict(numbers), "listed": listed}))
    else:
        _print_numbers(numbers)
        if census is not None:
            _print_census(census)


async def _by_tenant(arguments: argparse.Namespace, names: Mapping[bytes, str]) -> None:
    async with visiting(arguments.url, "read") as store:
        found = await each_tenant(listed(arguments.url, store), names)
    if arguments.json:
        print(json.dumps({"tenants": [one.as_json() for one in found]}))
        return
    print(_TENANT.format("TENANT", "BLOCKS", "BYTES", "HITS", "TOKENS SAVED"))
    for one in found:
        hits, saved = (
            "-" if number is None else str(number) for number in (one.hits, one.tokens_saved)
        )
        print(_TENANT.format(_shown(one), one.blocks, format_size(one.bytes), hits, saved))


def _shown(one: TenantUse) -> str:
    if one.name is not None:
        return one.name
    return "(unknown)" if one.digest is None else one.digest.hex()


def _of_store(numbers: Mapping[str, float], url: StoreUrl) -> dict[str, float]:
    """Returns `numbers` without those of this command's own calls, and with the capacity of `url`.

    A store that is opened to read reports no capacity.
    """
    found = {name: value for name, value in numbers.items() if name.rpartition(".")[2] not in _OWN}
    if (capacity := url.query.get("capacity")) is not None:
        found.setdefault("capacity", parse_size(capacity))
    return found


def _print_numbers(numbers: Mapping[str, float]) -> None:
    print("store")
    for name, value in numbers.items():
        size = name.rpartition(".")[2] in _SIZES
        text = format_size(int(value)) if size else f"{value:.15g}"  # all digits of a count
        print(f"  {name:<24} {text}")


def _print_census(census: _Census) -> None:
    print(f"listed: {census.blocks} blocks, {format_size(census.nbytes)}")
    if census.oldest is not None and census.last_used is not None:
        now = time.time()
        print(f"  {'oldest':<24} {max(0.0, now - census.oldest) / 3600:.1f} h ago")
        print(f"  {'last used':<24} {max(0.0, now - census.last_used) / 3600:.1f} h ago")
    for name, (blocks, nbytes) in census.by.items():
        print(f"by {name}")
        for value, count in blocks.most_common(_SHOWN):
            shown = value[:16] or "(not known)"
            print(f"  {shown:<24} {count} blocks, {format_size(nbytes[value])}")
        if len(blocks) > _SHOWN:
            print(f"  … and {len(blocks) - _SHOWN} more; --json lists them all")
