"""The command ``kvconnect verify``: reads every frame of a store and checks it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from kvconnect.backends.main_loop import run_to_end
from kvconnect.backends.url import StoreUrl, format_size
from kvconnect.cli.command import add_json, add_url, tell
from kvconnect.errors import BadFrame
from kvconnect.operations.progress import Progress
from kvconnect.operations.visit import each_block, listed, parts, visiting

if TYPE_CHECKING:
    from kvconnect.operations.frame_reader import ReadFrame

_REPORTED = 1000


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``verify``."""
    parser.description = (
        "Read every block of a store and check that header, key and checksum fit. An "
        "engine does the same with each block it loads, and computes what is bad; this finds it "
        "before. Of a tiered store every tier is checked. The exit code is 1 if a block is bad."
    )
    add_url(parser)
    parser.add_argument("--delete", action="store_true", help="delete what is bad")
    add_json(parser)


@dataclass(slots=True)
class _Findings:
    opened: bool = False
    sound: int = 0
    bytes: int = 0
    gone: int = 0
    bad: int = 0
    bad_blocks: list[dict[str, str]] = field(default_factory=list)
    url: str = ""
    complete: bool = False


def run(arguments: argparse.Namespace) -> None:
    """Checks the blocks, reports (also after Ctrl-C), and raises `BadFrame` if one is damaged."""
    findings = _Findings(url=str(StoreUrl.parse(arguments.url)))
    try:
        run_to_end(_verify(arguments, findings))
        findings.complete = True
    finally:
        if findings.opened:
            _report(arguments, findings)
    if findings.bad:
        deleted = " and were deleted" if arguments.delete else "; --delete deletes them"
        of = f"{findings.sound + findings.bad} blocks"
        raise BadFrame(f"{findings.bad} of {of} are bad{deleted}")


async def _verify(arguments: argparse.Namespace, findings: _Findings) -> None:
    from kvconnect.operations.frame_reader import read_frames

    async with visiting(arguments.url, "maintain" if arguments.delete else "read") as store:
        chosen = listed(arguments.url, store)
        findings.opened = True
        for name in parts(store):
            if name not in chosen:
                tell(f"{name} cannot list its blocks: left out")
        for name, part in chosen.items():
            total = int((await part.stats()).get("blocks", 0))
            async with Progress(f"verify {name}", total, "blocks") as progress:
                async for batch in read_frames(part, each_block(part)):
                    bad = _sort_out(name, batch, findings)
                    if arguments.delete and bad:
                        await part.delete([one.entry.key for one in bad])
                    progress.advance(len(batch))


def _sort_out(part: str, batch: Sequence[ReadFrame], findings: _Findings) -> list[ReadFrame]:
    """Counts the frames of `batch`; returns the damaged ones."""
    bad = [one for one in batch if one.problem]
    sound = [one for one in batch if not one.problem and not one.gone]
    findings.sound += len(sound)
    findings.bytes += sum(one.entry.nbytes for one in sound)
    findings.gone += sum(one.gone for one in batch)
    findings.bad += len(bad)
    for one in bad[: _REPORTED - len(findings.bad_blocks)]:
        findings.bad_blocks.append(
            {"store": part, "key": one.entry.key.hex(), "problem": one.problem}
        )
    return bad


def _report(arguments: argparse.Namespace, findings: _Findings) -> None:
    if arguments.json:
        numbers = asdict(findings) | {"deleted": findings.bad if arguments.delete else 0}
        del numbers["opened"]
        print(json.dumps(numbers), flush=True)
        return
    for one in findings.bad_blocks:
        print(f"bad: {one['store']} {one['key'][:16]}: {one['problem']}")
    if findings.bad > len(findings.bad_blocks):
        print(f"bad: … and {findings.bad - len(findings.bad_blocks)} more")
    gone = f"; {findings.gone} were dropped meanwhile" if findings.gone else ""
    size = format_size(findings.bytes)
    rest = "" if findings.complete else "; interrupted: the rest was not read"
    counted = f"{findings.sound} blocks, {size}, are sound; {findings.bad} are bad{gone}{rest}"
    print(f"{findings.url}: {counted}", flush=True)
