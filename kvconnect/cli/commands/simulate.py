"""The command ``kvconnect simulate``: predicts the effect of a cache on a trace."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING

from kvconnect.cli.command import add_json, add_number, add_old_name, require_at_least_one
from kvconnect.cli.machines import add_store_rates, parse_machines, parse_store_rates
from kvconnect.errors import ConfigurationError
from kvconnect.operations.progress import Progress
from kvconnect.simulate.first_token import ExternalHit
from kvconnect.simulate.plot import check_plot, write_plot
from kvconnect.simulate.report import Report, Run
from kvconnect.simulate.retention_policy import RetentionPolicy
from kvconnect.simulate.trace_reader import TraceReader

if TYPE_CHECKING:
    from kvconnect.simulate.simulator import Simulator

_REQUESTS_PER_UPDATE = 256

_DESCRIPTION = """\
Drive the block manager, without a model and without tensors, by a trace of requests: how many
prompt tokens would be found on the device, in host memory and in an external store, what is
evicted and what is moved. TRACE holds JSON lines in the format of the published Mooncake traces
(timestamp, input_length, output_length, hash_ids), or with tokens and output_tokens; kvconnect
make-trace writes synthetic ones."""

_EPILOG = """\
examples:
  kvconnect make-trace trace.jsonl --requests 20000
  kvconnect simulate trace.jsonl --device-cache 500ktok --host-cache 2Mtok --plot over-time.png
  kvconnect simulate trace.jsonl --model DIR --sweep device=4GiB,8GiB,16GiB,32GiB --plot sizes.png
  kvconnect simulate trace.jsonl --device-cache 500ktok --retention system=90:600s
  kvconnect simulate trace.jsonl --device-cache 200ktok --external 9Mtok --store-rate 2ktok,8ktok
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``simulate``."""
    parser.description = _DESCRIPTION
    parser.epilog = _EPILOG
    parser.add_argument("trace", metavar="TRACE", help="JSON lines; .gz is unpacked; - is stdin")
    _add_tiers(parser)
    _add_serving(parser)
    add_store_rates(parser)
    add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png, .svg or .pdf")


def _add_tiers(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "cache", "SIZE is in bytes (16GiB) or in tokens (500000tokens, 500ktok, 2Mtok)."
    )
    group.add_argument("--device-cache", metavar="SIZE", help="KV memory of the device")
    group.add_argument("--host-cache", metavar="SIZE", help="pinned host memory (default: none)")
    for tier in ("device", "host"):
        add_old_name(group, f"--{tier}", f"--{tier}-cache")
    group.add_argument("--external", metavar="SIZE", help="a store beyond it (default: none)")
    group.add_argument(
        "--sweep", metavar="TIER=SIZE,…", help="one run for each size of device, host or external"
    )
    known = group.add_mutually_exclusive_group()
    add_number(known, "--bytes-per-token", "of keys and values, all layers together")
    known.add_argument(
        "--model", type=Path, metavar="DIR", help="the same, of the model whose config.json is here"
    )
    add_number(group, "--tokens-per-block", "a power of two", default=32, metavar="T")
    group.add_argument(
        "--state-size",
        metavar="SIZE",
        help="of one snapshot of all recurrent layers (default: the model has none)",
    )
    add_number(group, "--state-interval", "tokens between two snapshots", default=1024, metavar="N")
    policy = group.add_mutually_exclusive_group()
    policy.add_argument(
        "--retention",
        nargs="+",
        action="extend",
        default=[],
        metavar="PART=PRIORITY[:DURATION]",
        help="what requests ask for; PART is system, prompt, decode or prompt tokens as in 0:2048; "
        "priorities are 0 to 100, 35 without (default: none)",
    )
    policy.add_argument(
        "--retention-file", metavar="FILE", help="the same, as the fields of KvCacheRetentionConfig"
    )
    add_number(
        group,
        "--offload-min-priority",
        "blocks below it are dropped instead of copied to the host",
        default=35,
        metavar="P",
    )


def _add_serving(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    add_number(group, "--limit", "only the first so many (default: all)")
    add_old_name(group, "--requests", "--limit")
    add_number(group, "--hash-tokens", "tokens that a hash id stands for", default=512)
    add_number(
        group,
        "--prefill-tokens-per-s",
        "prompt tokens that one request computes per second",
        default=8000.0,
        metavar="X",
    )
    add_number(
        group,
        "--decode-tokens-per-s",
        "tokens that one request generates per second",
        default=50.0,
        metavar="X",
    )
    add_number(group, "--max-batch-size", "requests served at once (default: as many as have room)")
    add_number(
        group,
        "--max-waiting",
        "requests that may wait for room; more are turned away",
        default=10_000,
    )


def run(arguments: argparse.Namespace) -> None:
    """Simulates, then prints and draws the results; after Ctrl-C, those so far.

    Raises:
        ConfigurationError: a bad option, trace, model or policy.
        MissingExtra: ``--plot`` without matplotlib, ``--model`` without transformers.
        KeyboardInterrupt: after Ctrl-C, once everything is printed.
    """
    if arguments.plot is not None:
        check_plot(arguments.plot)
    report = _simulate(arguments)
    print(report.json() if arguments.json else report.text(), flush=True)
    if arguments.plot is not None:
        write_plot(report, arguments.plot)
    if report.interrupted:
        raise KeyboardInterrupt


def _simulate(arguments: argparse.Namespace) -> Report:
    from kvconnect.simulate.simulator import Simulator

    require_at_least_one(arguments, "limit", "bytes_per_token")
    token_nbytes = _token_nbytes(arguments)
    policy = RetentionPolicy(arguments.retention)
    if arguments.retention_file is not None:
        policy = RetentionPolicy.from_file(arguments.retention_file)
    machines = parse_machines(arguments, token_nbytes)
    rates = parse_store_rates(arguments, [machine for _, machine in machines.runs], token_nbytes)
    hits: list[list[ExternalHit]] = [[] for _ in machines.runs]
    with TraceReader(arguments.trace, hash_tokens=arguments.hash_tokens) as trace:
        simulators = [
            Simulator(machine, policy, mine if rates else None)
            for (_, machine), mine in zip(machines.runs, hits, strict=True)
        ]
        num_read, interrupted = _drive(simulators, trace, arguments.limit)
    if num_read == 0 and not interrupted:
        raise ConfigurationError(f"trace '{trace.name}': holds no request")
    return Report(
        trace.name,
        num_read,
        trace.last_arrival,
        interrupted,
        [
            Run(machine, simulator.tally, label, mine)
            for (label, machine), simulator, mine in zip(
                machines.runs, simulators, hits, strict=True
            )
        ],
        token_nbytes,
        machines.swept,
        rates,
    )


def _drive(
    simulators: Sequence[Simulator], trace: TraceReader, most: int | None
) -> tuple[int, bool]:
    """Passes every request to every simulator; returns the count, and whether Ctrl-C ended it."""
    num_read = told = 0
    with _progress(trace, most) as progress, _noting_interrupt() as interrupt:
        for request in islice(trace, most):
            for simulator in simulators:
                simulator.arrive(request)
            num_read += 1
            if num_read % _REQUESTS_PER_UPDATE == 0 and progress is not None:
                done = num_read if most is not None else trace.bytes_read
                progress.advance(done - told)
                told = done
            if interrupt.is_set():
                return num_read, True
        for simulator in simulators:
            simulator.finish()
    return num_read, False


def _progress(trace: TraceReader, most: int | None) -> AbstractContextManager[Progress | None]:
    if most is not None:
        return Progress("simulate", most, "requests")
    if trace.num_bytes is None:
        return nullcontext()
    return Progress("simulate", trace.num_bytes, "bytes")


@contextmanager
def _noting_interrupt() -> Iterator[Event]:
    """Sets the event at the first Ctrl-C in the block; a second one raises. Main thread only."""
    interrupt = Event()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.is_set():
            raise KeyboardInterrupt
        interrupt.set()

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


# -------------------------------------------------------------------- options


def _token_nbytes(arguments: argparse.Namespace) -> int | None:
    if arguments.model is None:
        given: int | None = arguments.bytes_per_token
        return given
    from kvconnect.simulate.model_size import token_nbytes

    return token_nbytes(arguments.model)
