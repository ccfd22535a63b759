"""Verbs on stores of every kind: killed, repeated, and carried to another host."""

from __future__ import annotations

import subprocess
import sys

import pytest
from killed_verbs import killed
from s3_server import BUCKET
from stored_blocks import entries, fill, frames, prompt_chain

from kvconnect import PromptStore
from kvconnect.errors import BadFrame
from kvconnect.keys import Namespace

PROMPT = list(range(1000, 1022))


# What verbs do is the same whatever is below them; of `tiered` both tiers are asked.
@pytest.fixture(
    params=[
        "tiered",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("disk", "redis", "s3")),
    ]
)
def make_url(request, tmp_path):
    """Names a store of one kind."""
    if request.param == "s3":
        endpoint = request.getfixturevalue("s3_server").endpoint
        return lambda name: f"s3://{BUCKET}/{name}?endpoint_url={endpoint}"
    if request.param == "disk":
        return lambda name: f"disk:{tmp_path}/{name}?capacity=64MiB"
    url = request.getfixturevalue("own_redis").url
    if request.param == "redis":
        return lambda name: f"{url}?prefix={name}:"
    return lambda name: (
        f"tiered:?tiers=disk:{tmp_path}/{name}%3Fcapacity=64MiB,{url}%3Fprefix={name}:"
    )


def test_killed_exports_and_imports_are_repeated_on_every_store(make_url, tmp_path):
    source, target, file = make_url("source"), make_url("target"), tmp_path / "prompts.kv"
    part = tmp_path / "prompts.kv.part"
    one = prompt_chain(PROMPT, namespace=Namespace("mine"))
    other = prompt_chain(PROMPT[::-1], namespace=Namespace("yours"))
    fill(source, [*one, *other])
    for point, count in (("add", 4), ("finish", 1)):
        killed("export", source, file, point, count)
        assert (file.exists(), part.exists()) == (False, True)
        with pytest.raises(BadFrame):
            PromptStore(target).import_(part)
    done = PromptStore(source).export(file, everything=True)
    assert done.blocks == 12
    assert done.resumed > 0
    stored = 0
    for count in (7, 5):
        killed("import", target, file, "save", count)
        there = entries(target).keys()
        assert len(there) >= stored, "what was saved stays"
        stored = len(there)
        for chain in (one, other):
            have = [block.key in there for block in chain]
            assert have == sorted(have, reverse=True), "beginnings of prompts"
    assert 0 < stored < 12
    found = PromptStore(target).import_(file)
    assert found.complete
    keys = [block.key for block in [*one, *other]]
    assert frames(target, keys) == frames(source, keys)
    assert None not in frames(target, keys)
    assert PromptStore(target).import_(file).blocks == 0


def test_killed_drops_and_pins_are_repeated_on_every_store(make_url, tmp_path):
    url = make_url("verbs")
    mine = prompt_chain(PROMPT, namespace=Namespace("mine"))
    yours = prompt_chain(PROMPT[::-1], namespace=Namespace("yours"))
    fill(url, [*mine, *yours])
    if not url.startswith("s3:"):
        killed("pin", url, tmp_path, "pin", 4)  # the first call of each tier asks if it has pins
        assert 0 < len(pinned(url)) < 6
        assert PromptStore(url).pin(salt="mine").complete
        assert pinned(url) == {one.key for one in mine}
    killed("drop", url, tmp_path, "delete", 3)
    have = [one.key in entries(url) for one in mine]
    assert have == sorted(have, reverse=True), "beginnings of prompts"
    assert 0 < sum(have) < 6
    assert PromptStore(url).drop(salt="mine").complete
    assert entries(url).keys() == {one.key for one in yours}
    assert PromptStore(url).drop(salt="mine").blocks == 0
    if not url.startswith("s3:"):
        assert not pinned(url)


def test_a_killed_prefetch_is_repeated(own_redis, tmp_path):
    near, far = f"disk:{tmp_path}/near?capacity=64MiB", own_redis.url
    url = f"tiered:?tiers={near.replace('?', '%3F')},{far}"
    mine = prompt_chain(PROMPT, namespace=Namespace("mine"))
    fill(far, mine)
    killed("prefetch", url, tmp_path, "save", 3)
    have = [one.key in entries(near) for one in mine]
    assert (sum(have), have) == (2, sorted(have, reverse=True))
    done = PromptStore(url).prefetch(salt="mine")
    assert (done.blocks, done.present) == (4, 2)
    assert frames(near, [one.key for one in mine]) == frames(far, [one.key for one in mine])


def pinned(url: str) -> set[bytes]:
    return {key for key, one in entries(url).items() if one.pinned_until}


FILLED = """
import asyncio, hashlib, sys
import numpy as np, torch
from kvconnect import frame
from kvconnect.backend import StoredBlock
from kvconnect.backends import open_backend
from kvconnect.frame import FrameHeader
from kvconnect.keys import BlockKey, Namespace
url, count, payload = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
async def main():
    store = open_backend(url, raw=True)
    await store.open([])
    parent = BlockKey(bytes(32))
    for number in range(count):
        key = BlockKey(hashlib.blake2b(str(number).encode(), digest_size=32).digest())
        data = torch.zeros(frame.frame_nbytes(payload), dtype=torch.uint8)
        random = torch.Generator().manual_seed(number)
        values = torch.randint(256, (payload,), dtype=torch.uint8, generator=random)
        frame.payload(data, payload).copy_(values)
        frame.seal(data, FrameHeader(4, payload, b"f" * 16, key))
        tokens = np.arange(16 * number, 16 * number + 16, dtype=np.int32)
        block = StoredBlock(key, data, parent, tokens, 35, Namespace("t").tag(), b"m" * 32, 0)
        assert await store.save([block]) == 1
        parent = key
    await store.close()
asyncio.run(main())
"""

IMPORTED = """
import os, resource, sys
from kvconnect import PromptStore
source, url, file = sys.argv[1:]
assert not os.path.exists(source), "this host never saw the first store"
assert not any(line.split(":")[0].strip() not in ("lo",) for line in
               open("/proc/net/dev").read().splitlines()[2:]), "nor is it on a network"
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
done = PromptStore(url).import_(file)
print(done.blocks, done.tokens, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def python(code: str, *arguments: object, prefix: tuple[str, ...] = ()) -> str:
    command = [*prefix, sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def may_unshare() -> bool:
    return not subprocess.run(["unshare", "-rmn", "true"], check=False).returncode


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not may_unshare(), reason="namespaces of users are not allowed here")
def test_a_gigabyte_is_carried_to_a_host_that_never_saw_it(tmp_path):
    """The other host: namespaces of its own for files and network, where the store is not."""
    count, payload = 1024, (1 << 20) - 4096
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    source = f"disk:{tmp_path}/here/kv?capacity=2GiB"
    python(FILLED, source, count, payload)
    file = tmp_path / "there" / "prompts.kv"
    done = PromptStore(source).export(file, everything=True)
    assert (done.blocks, done.tokens) == (count, 16 * count)
    assert file.stat().st_size > 1 << 30
    hide = f'mount -t tmpfs none {tmp_path}/here && exec "$@"'
    elsewhere = ("unshare", "-rmn", "sh", "-c", hide, "sh")
    target = f"disk:{tmp_path}/there/kv?capacity=2GiB"
    out = python(IMPORTED, tmp_path / "here" / "kv", target, file, prefix=elsewhere)
    blocks, tokens, more_kib = map(int, out.split())
    assert (blocks, tokens) == (count, 16 * count)
    assert more_kib < 256 << 10, "of the file only a few batches are in memory"
    assert entries(target).keys() == entries(source).keys()
