"""Listings that do not end, or that bring nothing for long; and work that was interrupted."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import pytest
from stored_blocks import NBYTES, chain, entries, fill

from kvconnect.backends.disk.store import DiskBackend
from kvconnect.operations import frame_reader, visit
from kvconnect.operations.progress import Progress

COMMANDS = {
    "ls": ["ls"],
    "stats": ["stats"],
    "verify": ["verify"],
    "prune": ["prune", "--to-size", "0", "--dry-run"],
}


@pytest.fixture
def again_and_again(monkeypatch):
    """The store lists its blocks without end."""
    monkeypatch.setattr(visit, "_MOST_REPEATS", 100)
    scan = DiskBackend.scan

    async def scan_for_ever(self):
        while True:
            async for entry in scan(self):
                yield entry

    monkeypatch.setattr(DiskBackend, "scan", scan_for_ever)


@pytest.mark.usefixtures("again_and_again")
@pytest.mark.parametrize("command", ["ls", "verify", "copy"])
def test_listing_that_brings_the_same_again_and_again_ends_with_an_error(
    kvconnect, url, tmp_path, command
):
    fill(url, chain("a", 5))
    arguments = [*COMMANDS.get(command, ["copy"]), url]
    if command == "copy":
        arguments.append(f"disk:{tmp_path / 'target'}?capacity=64MiB")
    code, out, err = kvconnect(*arguments)
    assert code == 4
    assert "listing does not end: 5 blocks come again and again" in err
    if command == "ls":
        assert len(out.splitlines()) == 1 + 5
    if command == "verify":
        size = f"{5 * NBYTES >> 10} KiB"
        assert f": 5 blocks, {size}, are sound; 0 are bad; interrupted: the rest" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_while_a_listing_brings_nothing_a_line_says_that_it_goes_on(
    kvconnect, url, monkeypatch, command
):
    fill(url, chain("a", 5))
    monkeypatch.setattr("kvconnect.operations.progress._SECONDS_BETWEEN_LINES", 0.05)
    scan, advance, told = DiskBackend.scan, Progress.advance, asyncio.Event()

    async def hesitating(self):
        await told.wait()
        async for entry in scan(self):
            yield entry

    def tell(self, count):
        advance(self, count)
        if count == 0:
            told.set()

    monkeypatch.setattr(DiskBackend, "scan", hesitating)
    monkeypatch.setattr(Progress, "advance", tell)
    code, _, err = kvconnect(*COMMANDS[command], url)
    assert code == 0
    assert ": 0 " in err.splitlines()[0]


@pytest.mark.parametrize("as_json", [False, True])
def test_verify_that_was_interrupted_says_so(kvconnect, url, monkeypatch, as_json):
    fill(url, chain("a", 9))
    monkeypatch.setattr(frame_reader, "_BATCH_BLOCKS", 2)
    advance = Progress.advance

    def interrupt(self, count):
        advance(self, count)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "advance", interrupt)
        code, out, _ = kvconnect("verify", url, *["--json"] * as_json)
    assert code == 130
    if as_json:
        found = json.loads(out)
        assert 0 < found["sound"] < 9
        assert not found["complete"]
        assert json.loads(kvconnect("verify", url, "--json")[1])["complete"]
    else:
        assert "; interrupted: the rest was not read" in out
        assert "interrupted" not in kvconnect("verify", url)[1]
    assert len(entries(url)) == 9
