"""``kvconnect verify``: reads every frame of a store and checks it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvconnect.backends.url import format_size
from kvconnect.cli.command import Subparsers
from kvconnect.cli.frame_reader import ReadFrame, read_frames
from kvconnect.cli.progress import Progress
from kvconnect.cli.visit import Part, add_url, listed, parts, visit, visiting
from kvconnect.errors import BadFrame

__all__ = ["add_parser", "run"]

_REPORTED = 1000


def add_parser(subparsers: Subparsers) -> None:
    """Add ``verify``."""
    parser = subparsers.add_parser(
        "verify",
        help="read every block of a store and check it",
        description="Read every block of a store and check that header, key and checksum fit. An "
        "engine does the same with each block it loads, and computes what is bad; this finds it "
        "before. Of a tiered store every tier is checked. The exit code is 1 if a block is bad.",
    )
    add_url(parser)
    parser.add_argument("--delete", action="store_true", help="delete what is bad")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


@dataclass(slots=True)
class _Findings:
    opened: bool = False
    checked: int = 0
    nbytes: int = 0
    gone: int = 0
    num_bad: int = 0
    bad: list[dict[str, str]] = field(default_factory=list)


def run(arguments: argparse.Namespace) -> None:
    """Check, report, and raise `BadFrame` if a block is bad."""
    findings = _Findings()
    try:
        visit(_verify(arguments, findings))
    finally:
        if findings.opened:
            _report(arguments, findings)
    if findings.num_bad:
        deleted = " and were deleted" if arguments.delete else "; --delete deletes them"
        of = f"{findings.checked + findings.num_bad} blocks"
        raise BadFrame(f"{findings.num_bad} of {of} are bad{deleted}")


async def _verify(arguments: argparse.Namespace, findings: _Findings) -> None:
    async with visiting(arguments.url, "maintain" if arguments.delete else "read") as store:
        chosen = listed(arguments.url, store)
        findings.opened = True
        for part in parts(store):
            if part not in chosen:
                print(f"kvconnect: {part.name} cannot list its blocks: left out", file=sys.stderr)
        for part in chosen:
            total = int((await part.store.stats()).get("blocks", 0))
            with Progress(f"verify {part.name}", total, "blocks") as progress:
                async for batch in read_frames(part.store, part.store.scan()):
                    bad = _sort_out(part, batch, findings)
                    if arguments.delete and bad:
                        await part.store.delete([one.entry.key for one in bad])
                    progress.advance(len(batch))


def _sort_out(part: Part, batch: Sequence[ReadFrame], findings: _Findings) -> list[ReadFrame]:
    """Count `batch`; return what is bad."""
    bad = [one for one in batch if one.problem]
    sound = [one for one in batch if not one.problem and not one.gone]
    findings.checked += len(sound)
    findings.nbytes += sum(one.entry.nbytes for one in sound)
    findings.gone += sum(one.gone for one in batch)
    findings.num_bad += len(bad)
    for one in bad[: _REPORTED - len(findings.bad)]:
        findings.bad.append(
            {"store": part.name, "key": one.entry.key.hex(), "problem": one.problem}
        )
    return bad


def _report(arguments: argparse.Namespace, findings: _Findings) -> None:
    if arguments.json:
        numbers = {
            "sound": findings.checked,
            "bytes": findings.nbytes,
            "gone": findings.gone,
            "bad": findings.num_bad,
            "deleted": findings.num_bad if arguments.delete else 0,
            "bad_blocks": findings.bad,
        }
        print(json.dumps(numbers), flush=True)
        return
    for one in findings.bad:
        print(f"bad: {one['store']} {one['key'][:16]}: {one['problem']}")
    if findings.num_bad > len(findings.bad):
        print(f"bad: … and {findings.num_bad - len(findings.bad)} more")
    gone = f"; {findings.gone} were dropped meanwhile" if findings.gone else ""
    size = format_size(findings.nbytes)
    print(f"{findings.checked} blocks, {size}, are sound; {findings.num_bad} are bad{gone}")
    sys.stdout.flush()
