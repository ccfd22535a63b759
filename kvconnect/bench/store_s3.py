"""boto3 moving the same values to the same service in its ordinary way, and S3 without a service.

``python -m kvconnect.bench.store_s3`` starts a plain server and measures the store, the floor and
boto3 against it. The others, and which way boto3 is used, are in the table; the last lines say how
many times as fast as boto3's ordinary body read the store's GET is, each taken by the same floor.
"""

from __future__ import annotations

import argparse
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import boto3

from kvconnect.backends.s3_settings import S3Settings
from kvconnect.backends.url import StoreUrl, parse_size
from kvconnect.bench.store import bench_store
from kvconnect.bench.store_floor import Floor, fastest
from kvconnect.bench.store_floor_s3 import open_floor, values_per_object
from kvconnect.bench.store_payloads import Payloads, StorePlan
from kvconnect.bench.store_report import StoreFigure, median_ratio, render
from kvconnect.bench.store_s3_server import plain_server

__all__ = ["bench_boto3"]

_BUCKET = "bench"


def bench_boto3(url: str, plan: StorePlan, tell: Callable[[str], None]) -> list[StoreFigure]:
    """``put_object`` and ``get_object()["Body"].read()`` of the same values, beside the floor.

    Once with objects as long as those of the store, once with an object for each value; as many
    calls at once as the store gets. Blocks. Leaves nothing behind.

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
                figures += _Boto3(settings, payloads, step, plan).figures(floor)
        finally:
            if floor is not None:
                floor.close()
    return figures


class _Boto3:
    """boto3 and nothing around it: objects of `step` values each."""

    def __init__(
        self, settings: S3Settings, payloads: Payloads, step: int, plan: StorePlan
    ) -> None:
        self._plan = plan
        self._payloads = payloads
        self._what = "one object per value" if step == 1 else f"objects of {step} values"
        self._bucket = settings.bucket
        self._client: Any = boto3.Session(profile_name=settings.profile).client(
            "s3",
            endpoint_url=settings.endpoint_url,
            region_name=settings.region or ("us-east-1" if settings.endpoint_url else None),
            verify=settings.ca_bundle,
        )
        stem = secrets.token_hex(8)
        blocks = payloads.blocks
        self._objects = {
            settings.name("bench", stem, str(start)): [
                block.data.numpy().data for block in blocks[start : start + step]
            ]
            for start in range(0, payloads.count, step)
        }

    def figures(self, floor: Floor | None) -> list[StoreFigure]:
        """Of put and get; leaves nothing behind."""
        ways = {"put": self._put, "get": self._get}
        seconds: dict[str, list[float]] = {what: [] for what in ways}
        floors: dict[str, list[Sequence[float]]] = {what: [] for what in ways}
        try:
            for number in range(self._plan.rounds + 1):
                for what, way in ways.items():
                    spent = self._all(way)
                    least = [] if floor is None else [getattr(floor, what)()]
                    if number:  # the first one connects
                        seconds[what].append(spent)
                        floors[what] += least
        finally:
            for name in self._objects:
                self._client.delete_object(Bucket=self._bucket, Key=name)
            self._client.close()
        name = "" if floor is None else floor.name
        return [self._figure(what, seconds[what], floors[what], name) for what in ways]

    def _figure(
        self, what: str, seconds: Sequence[float], floors: Sequence[Sequence[float]], name: str
    ) -> StoreFigure:
        rates = [self._payloads.total / one for one in seconds]
        least = [self._payloads.total / one for one in fastest(floors)] if floors else []
        return StoreFigure(
            "s3",
            what,
            f"boto3, {self._what}",
            self._payloads.nbytes,
            statistics.median(rates),
            floor=statistics.median(least) if least else None,
            floor_name=name,
            ratio=median_ratio(rates, least) if least else None,
        )

    def _all(self, way: Callable[[str], object]) -> float:
        with ThreadPoolExecutor(self._plan.in_flight) as pool:
            start = time.perf_counter()
            list(pool.map(way, self._objects))
            return time.perf_counter() - start

    def _put(self, name: str) -> None:
        # It takes bytes in one piece; joining several is what a user would have to do, too.
        body = b"".join(self._objects[name])
        self._client.put_object(Bucket=self._bucket, Key=name, Body=body)

    def _get(self, name: str) -> None:
        self._client.get_object(Bucket=self._bucket, Key=name)["Body"].read()


def compare(figures: Sequence[StoreFigure]) -> list[str]:
    """How many times as fast as boto3 the bare store reads, for each size."""
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


@contextmanager
def _credentials() -> Iterator[None]:
    names = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def main() -> None:
    """Measure against a plain server."""
    parser = argparse.ArgumentParser(prog="python -m kvconnect.bench.store_s3")
    parser.add_argument("--sizes", default="256KiB,2MiB,32MiB", help="of values (%(default)s)")
    parser.add_argument("--total", default="128MiB", help="of all values (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="medians of so many (%(default)s)")
    arguments = parser.parse_args()
    plan = StorePlan(
        sizes=tuple(parse_size(size, field="--sizes") for size in arguments.sizes.split(",")),
        total_nbytes=parse_size(arguments.total, field="--total"),
        rounds=arguments.rounds,
    )
    with plain_server() as endpoint, _credentials():
        url = f"s3://{_BUCKET}/?endpoint_url={endpoint}&sign_payload=no"
        figures = bench_store(url, plan, _tell) + bench_boto3(url, plan, _tell)
    print("\n".join([render(f"store {url}", figures), *compare(figures)]))


def _tell(what: str) -> None:
    print(f"kvconnect: {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
