"""Pulls between two processes, each beside its floor."""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from kvconnect.bench.report import Figure, median_ratio
from kvconnect_bench.blocks.party import Party
from kvconnect_bench.transfer.floors import NotAllowed
from kvconnect_bench.transfer.link import DEVICE, ShapedLink, shaped_link
from kvconnect_bench.transfer.plan import TransferPlan

_MODULE = "kvconnect_bench.transfer.pull_party"
_LOOPBACK = "127.0.0.1"
_PLAIN = "plain socket"
_BARE = "tcp without checksums"
_PUBLISHED = "tcp, published before"

Read: TypeAlias = Callable[[], float]
"""Reads everything once; returns the seconds that took."""


@dataclass(frozen=True, slots=True)
class PullPair:
    """A pair of processes with memory of one size; `reader` reads from `source`.

    Attributes:
        source, reader: the processes.
        nbytes: of the memory of each.
        pid, address: of the source's memory.
        hosts: addresses that source and reader listen on.
    """

    source: Party
    reader: Party
    nbytes: int
    pid: int
    address: int
    hosts: tuple[str, str]

    @classmethod
    @contextmanager
    def started(cls, nbytes: int, link: ShapedLink | None = None) -> Iterator[PullPair]:
        """Runs two processes on this host, or one at each end of `link`, until the end."""
        before = ((), ()) if link is None else (link.command(0), link.command(1))
        hosts = (_LOOPBACK, _LOOPBACK) if link is None else link.hosts
        with (
            Party(None, _MODULE, before=before[0]) as source,
            Party(None, _MODULE, before=before[1]) as reader,
        ):
            address = source.ask("fill", nbytes=nbytes)
            reader.ask("fill", nbytes=nbytes)
            yield cls(source, reader, nbytes, source.pid, address, hosts)

    def open(self, transport: str, *settings: Mapping[str, Any]) -> None:
        """Connects both sides by `transport`; `settings` of the source and of the reader."""
        source, reader = settings or ({}, {})
        local = self.source.ask("open", name=transport, settings=source)
        self.reader.ask("open", name=transport, settings=reader)
        self.reader.ask("connect", name=transport, local=local)

    def pull(self, transport: str, pieces: int, nbytes: int, epoch: int = 0) -> float:
        """Returns the seconds of one pull under the lease `epoch`; 0: without a lease."""
        what = {"name": transport, "pieces": pieces, "nbytes": nbytes, "epoch": epoch}
        return float(self.reader.ask("pull", **what))

    def checked(self, transport: str, plan: TransferPlan, epoch: int = 0) -> Read:
        """Returns a pull of all pieces of `plan`, which was done once and brought its bytes.

        Raises:
            RuntimeError: other bytes than those asked for.
        """
        pieces = plan.total_nbytes // plan.piece_nbytes
        read = partial(self.pull, transport, pieces, plan.piece_nbytes, epoch)
        self.check(read, pieces, plan.piece_nbytes)
        return read

    def check(self, read: Callable[[], object], pieces: int, nbytes: int) -> None:
        """Calls `read` once, and checks the bytes that it has read.

        Raises:
            RuntimeError: other bytes than those asked for.
        """
        self.reader.ask("forget")
        read()
        if not self.reader.ask("has_read", pieces=pieces, nbytes=nbytes):
            raise RuntimeError("a pull delivered other bytes than those asked for")


def turns(reads: Mapping[str, Read], rounds: int) -> dict[str, list[float]]:
    """Runs each of `reads` `rounds` times, by turns; returns the seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in reads}
    for _ in range(rounds):
        for name, read in reads.items():
            seconds[name].append(read())
    return seconds


def on_one_host(plan: TransferPlan) -> list[Figure]:
    """Measures NIXL between two processes of one host, against the system call that it uses.

    Raises:
        NotAllowed: the kernel does not let the reader read the source's memory.
        PartyFailed: NIXL does not work here.
    """
    pieces = plan.total_nbytes // plan.piece_nbytes
    with PullPair.started(plan.total_nbytes) as pair:
        what = {"pid": pair.pid, "address": pair.address}
        if refusal := pair.reader.ask("refusal", **what):
            raise NotAllowed(refusal)
        what |= {"pieces": pieces, "nbytes": plan.piece_nbytes}
        pair.open("nixl")
        reads = {
            "process_vm_readv": lambda: float(pair.reader.ask("process_read", **what)),
            "nixl": lambda: pair.pull("nixl", pieces, plan.piece_nbytes),
        }
        for read in reads.values():
            pair.check(read, pieces, plan.piece_nbytes)
        seconds = turns(reads, plan.rounds)
    targets = {("nixl", "process_vm_readv"): ">= 0.9"}
    return _speeds("same host", seconds, plan.total_nbytes, targets)


def on_loopback(plan: TransferPlan) -> list[Figure]:
    """Transports over the loopback, against one plain socket; TCP also without its checksums."""
    with ExitStack() as stack:
        pair = stack.enter_context(PullPair.started(plan.total_nbytes))
        for transport in plan.transports:
            tcp_only = {"tls": "tcp"} if transport == "nixl" else {}
            pair.open(transport, tcp_only, tcp_only)
        reads = _over_sockets(pair, plan)
        if "tcp" in plan.transports:
            bare = stack.enter_context(PullPair.started(plan.total_nbytes))
            bare.source.ask("leave_checksums_out")
            bare.reader.ask("leave_checksums_out")
            bare.open("tcp")
            reads[_BARE] = bare.checked("tcp", plan)
            # A prompt that was published before it is read, unlike one that is read meanwhile.
            pair.source.ask("keep_digests", name="tcp", nbytes=plan.piece_nbytes, epoch=1)
            reads[_PUBLISHED] = pair.checked("tcp", plan, epoch=1)
        seconds = turns(reads, plan.rounds)
    targets = {
        ("tcp", _PLAIN): ">= 0.9",
        ("tcp", _BARE): "",
        (_PUBLISHED, _BARE): ">= 0.85",
        ("nixl", _PLAIN): ">= 0.3",
    }
    return _speeds("loopback", seconds, plan.total_nbytes, targets)


def on_link(plan: TransferPlan, gbit: float) -> list[Figure]:
    """Transports over a link of `gbit` Gbit/s between two network namespaces.

    Rates are of the bytes that are read. The line carries headers, too, about 4 % of its bytes.
    The burst that the line lets pass after a pause matters less the longer a pull is.

    Raises:
        LinkRefused: there can be no such link.
    """
    with shaped_link(gbit) as link, PullPair.started(plan.total_nbytes, link) as pair:
        secret = secrets.token_hex(16)
        for transport in plan.transports:
            if transport == "nixl":
                both = {"tls": "tcp", "device": DEVICE}
                pair.open(transport, both, both)
            else:
                source, reader = ({"host": host, "secret": secret} for host in link.hosts)
                pair.open(transport, source, reader)
        seconds = turns(_over_sockets(pair, plan), plan.rounds)
    where = f"link of {gbit:g} Gbit/s"
    figures = []
    for name, taken in seconds.items():
        rate = plan.total_nbytes * 8 / statistics.median(taken) / 1e9
        target = "" if name == _PLAIN else ">= 0.95"
        figures.append(Figure(f"{where}: {name}", rate, "Gbit/s"))
        figures.append(Figure(f"{where}: {name} / line rate", rate / gbit, "x", target))
    return figures


def _over_sockets(pair: PullPair, plan: TransferPlan) -> dict[str, Read]:
    """Returns the reads over one plain socket and over all transports, each tried once."""
    host = pair.hosts[0]
    port = pair.source.ask("listen", host=host)
    reads = {_PLAIN: lambda: float(pair.reader.ask("plain_read", host=host, port=port))}
    reads[_PLAIN]()
    return reads | {name: pair.checked(name, plan) for name in plan.transports}


def _speeds(
    where: str,
    seconds: Mapping[str, list[float]],
    nbytes: int,
    targets: Mapping[tuple[str, str], str],
) -> list[Figure]:
    """Returns speeds, and for each pair in `targets` a share, the median of the rounds' own."""
    figures = [
        Figure(f"{where}: {name}", nbytes / statistics.median(taken) / 1e9, "GB/s")
        for name, taken in seconds.items()
    ]
    for (name, floor), target in targets.items():
        if name in seconds:
            ratio = median_ratio(seconds[floor], seconds[name])
            figures.append(Figure(f"{where}: {name} / {floor}", ratio, "x", target))
    return figures
