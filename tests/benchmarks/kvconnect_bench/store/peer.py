"""Measures a peer with values of the same size in the same place: LMCache, or boto3 for S3."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from kvconnect.backends.url import StoreUrl
from kvconnect.bench.store.payloads import StorePlan
from kvconnect.bench.store.report import StoreFigure
from kvconnect_bench.blocks.party import Party, PartyFailed
from kvconnect_bench.peer_python import require_peer_python

_MODULE = "kvconnect_bench.peers.lmcache"


def bench_peer(
    url: str, plan: StorePlan, python: Path | None, tell: Callable[[str], None]
) -> list[StoreFigure]:
    """Measures LMCache beside a store, or boto3 beside S3, of which LMCache has no counterpart.

    There are no figures without `python`, where LMCache does not start, and where it has no such
    store. In the last two cases `tell` is called with the reason.

    LMCache's put and get check nothing, so they compare with the bare figures as well as with the
    guarded ones.

    Raises:
        ConfigurationError: there is no such interpreter.
    """
    if StoreUrl.parse(url).scheme == "s3":  # boto3 is here anyway; LMCache has no counterpart
        from kvconnect_bench.peers.s3 import bench_boto3

        return bench_boto3(url, plan, tell)
    if python is None:
        return []
    require_peer_python(python)
    kinds = _kinds(url)
    if not kinds:
        tell(f"LMCache is left out: it has no counterpart of '{StoreUrl.parse(url).scheme}' here")
    figures: list[StoreFigure] = []
    for kind, name in kinds:
        for size in plan.sizes:
            try:
                figures += _measure(url, plan, python, kind, name, size)
            except PartyFailed as error:
                tell(f"{name} is left out at {size / 2**20:g} MiB ({error})")
    return figures


def _kinds(url: str) -> list[tuple[str, str]]:
    scheme = StoreUrl.parse(url).scheme
    return {
        "memory": [("memory", "LMCache")],
        "disk": [("disk", "LMCache")],
        "redis": [("redis", "LMCache, Python"), ("resp", "LMCache, C++")],
    }.get(scheme, [])


def _measure(
    url: str, plan: StorePlan, python: Path, kind: str, name: str, size: int
) -> list[StoreFigure]:
    count = max(2, plan.total_nbytes // size)
    with (
        tempfile.TemporaryDirectory(dir=_directory(url), prefix="bench-") as scratch,
        Party(python, _MODULE) as party,
    ):
        place = urlsplit(url).netloc.rpartition("@")[2] if kind in {"redis", "resp"} else scratch
        batch = max(1, plan.batch_nbytes // size)
        party.ask("start", kind=kind, place=place, nbytes=size, count=count, batch=batch)
        party.ask("round")  # touches memory, and does not count
        rounds = [party.ask("round") for _ in range(plan.rounds)]
        version = party.versions["version"]
    store = StoreUrl.parse(url).scheme
    figures = []
    for what in ("put", "get", "lookup"):
        amount = 1 if what == "lookup" else count * size
        how = name.replace("LMCache", f"LMCache {version}")
        rates = [amount / one[what] for one in rounds]
        figures.append(StoreFigure.of((store, what, how, size), rates))
    return figures


def _directory(url: str) -> str | None:
    parsed = StoreUrl.parse(url)
    return parsed.path if parsed.scheme == "disk" and Path(parsed.path).is_dir() else None
