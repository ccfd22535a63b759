"""Measures boto3 beside the S3 store: the same values, and the same service or a plain server.

``python -m kvconnect_bench.peers.s3`` starts a plain server and measures the store, the floor and
boto3 against it. The table names the ways in which boto3 is used. The lines below the table say how
many times as fast as boto3's ordinary body read the store's GET is, each as a ratio to the same
floor. Then come the same reads in turn, also one call at a time, with the client's processor time
of each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial

from kvconnect.backends.s3.settings import S3Settings
from kvconnect.backends.url import StoreUrl, parse_size
from kvconnect.bench.store.floor import Floor, fastest
from kvconnect.bench.store.payloads import Payloads, StorePlan
from kvconnect.bench.store.report import StoreFigure, render
from kvconnect.bench.store.run import bench_store
from kvconnect_bench.peers.s3_boto3 import Boto3
from kvconnect_bench.peers.s3_reads import bench_reads
from kvconnect_bench.servers.plain_s3 import any_credentials, plain_server
from kvconnect_bench.store.floor_s3 import open_floor, values_per_object

_BUCKET = "bench"


def bench_boto3(url: str, plan: StorePlan, tell: Callable[[str], None]) -> list[StoreFigure]:
    """Measures ``put_object`` and ``get_object()["Body"].read()`` of the same values.

    The objects are once as long as those of the store, and once hold one value each. As many calls
    run at once as the store gets. Blocks. Removes its objects at the end.

    Raises:
        ConfigurationError, BackendUnavailable: the service cannot be used.
    """
    settings = S3Settings.from_url(StoreUrl.parse(url))
    figures: list[StoreFigure] = []
    for size in plan.sizes:
        payloads = Payloads(size, max(2, plan.total_nbytes // size))
        tell(f"boto3: {payloads.count} values of {size / 2**20:g} MiB, {plan.rounds} rounds")
        floor = open_floor(url, payloads)
        try:
            together = values_per_object(payloads, settings)
            for step in dict.fromkeys((together, 1)):
                figures += _figures(Boto3(settings, payloads, step), plan, floor)
        finally:
            if floor is not None:
                floor.close()
    return figures


def _figures(boto3: Boto3, plan: StorePlan, floor: Floor | None) -> list[StoreFigure]:
    """Returns the figures of put and get; removes its objects at the end."""
    ways = {
        "put": partial(boto3.put_all, plan.puts_in_flight),
        "get": partial(boto3.get_all, plan.gets_in_flight),
    }
    seconds: dict[str, list[float]] = {what: [] for what in ways}
    floors: dict[str, list[Sequence[float]]] = {what: [] for what in ways}
    try:
        for number in range(plan.rounds + 1):
            for what, way in ways.items():
                spent = way()
                least = [] if floor is None else [getattr(floor, what)()]
                if number:  # the first one connects
                    seconds[what].append(spent)
                    floors[what] += least
    finally:
        boto3.close()
    total = boto3.payloads.total
    return [
        StoreFigure.of(
            ("s3", what, boto3.how, boto3.payloads.nbytes),
            [total / one for one in seconds[what]],
            floors=[total / one for one in fastest(floors[what])] if floor is not None else [],
            floor_name="" if floor is None else floor.name,
        )
        for what in ways
    ]


def compare(figures: Sequence[StoreFigure]) -> list[str]:
    """Returns lines that say how many times as fast as boto3 the bare store reads, by size."""
    lines = []
    gets = [one for one in figures if one.operation == "get" and one.ratio is not None]
    for own in [one for one in gets if one.how == "bare"]:
        for other in gets:
            if other.how.startswith("boto3") and other.value_nbytes == own.value_nbytes:
                size = f"{own.value_nbytes / 2**20:g} MiB"
                times = (own.ratio or 0) / (other.ratio or 1)
                most = 1 / (other.ratio or 1)
                lines.append(
                    f"  {size:>7}  get    {times:.1f} x {other.how}; the floor itself {most:.1f} x"
                )
    return lines


def main() -> None:
    """Measures against a plain server."""
    parser = argparse.ArgumentParser(prog="python -m kvconnect_bench.peers.s3")
    parser.add_argument("--sizes", default="256KiB,2MiB,32MiB", help="of values (%(default)s)")
    parser.add_argument("--total", default="128MiB", help="of all values (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="medians of so many (%(default)s)")
    arguments = parser.parse_args()
    plan = StorePlan(
        sizes=tuple(parse_size(size, field="--sizes") for size in arguments.sizes.split(",")),
        total_nbytes=parse_size(arguments.total, field="--total"),
        rounds=arguments.rounds,
    )
    with plain_server() as endpoint, any_credentials():
        url = f"s3://{_BUCKET}/?endpoint_url={endpoint}&sign_payload=no"
        figures = bench_store(url, plan, _tell) + bench_boto3(url, plan, _tell)
        reads = bench_reads(url, plan, _tell)
    print("\n".join([render(f"store {url}", figures), *compare(figures), "", *reads]))


def _tell(what: str) -> None:
    print(f"kvconnect: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
