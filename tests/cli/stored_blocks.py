"""Stores with frames in them, made behind the commands' back."""

from __future__ import annotations

import asyncio
import hashlib
import mmap
from dataclasses import replace

import numpy as np
import torch

from kvconnect import frame
from kvconnect.backend import StoredBlock
from kvconnect.backends import open_backend
from kvconnect.frame import FrameHeader
from kvconnect.keys import BlockKey, Namespace

PAYLOAD = 12000
NBYTES = frame.frame_nbytes(PAYLOAD)


def key_of(name: object) -> BlockKey:
    return BlockKey(hashlib.blake2b(repr(name).encode(), digest_size=32).digest())


def block(name, parent=None, **changes) -> StoredBlock:
    """A sound frame with all that is known of a block."""
    key = key_of(name)
    data = torch.zeros(NBYTES, dtype=torch.uint8)
    frame.payload(data, PAYLOAD).copy_(torch.arange(PAYLOAD) % 251 + key[0] % 5)
    frame.seal(data, FrameHeader(4, PAYLOAD, b"f" * 16, key))
    tokens = np.arange(4, dtype=np.int32)
    known = StoredBlock(
        key, data, None if parent is None else key_of(parent), tokens, 40, b"n" * 32, b"m" * 32, 1
    )
    return replace(known, **changes)


def chain(name, count, **changes) -> list[StoredBlock]:
    """Blocks of one prompt."""
    names = [(name, number) for number in range(count)]
    parents = [None, *names]
    return [block(one, parent, **changes) for one, parent in zip(names, parents, strict=False)]


def fill(url: str, blocks) -> None:
    """Save `blocks`, one at a time, as an engine would have over time."""

    async def save() -> None:
        store = open_backend(url, raw=True)
        await store.open([])
        for one in blocks:
            assert await store.save([one]) == 1
        await store.close()

    asyncio.run(save())


def entries(url: str):
    """What the store lists, by key."""

    async def scan():
        store = open_backend(url, raw=True)
        await store.open([])
        found = {entry.key: entry async for entry in store.scan()}
        await store.close()
        return found

    return asyncio.run(scan())


def frames(url: str, keys) -> list[bytes | None]:
    """The values of `keys`; ``None``: not there."""

    async def load():
        store = open_backend(url, raw=True)
        await store.open([])
        found = []
        for key in keys:
            data = torch.zeros(NBYTES, dtype=torch.uint8)
            loaded = await store.load([key], [data])
            found.append(bytes(data.numpy()) if loaded else None)
        await store.close()
        return found

    return asyncio.run(load())


def damage(directory, one: StoredBlock) -> None:
    """Flip a bit of the stored payload of `one`."""
    for path in directory.glob("segment-*.slots"):
        # Mapped: without a capacity a segment is a gibibyte, most of it holes.
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
            at = content.find(bytes(one.data[:128].numpy()))
            if at >= 0:
                content[at + 5000] ^= 1
                return
    raise AssertionError


def prompt_chain(
    tokens, *, size=4, namespace=Namespace(), model=b"m" * 32, group=0, shard=0
) -> list[StoredBlock]:
    """The blocks of a prompt as an engine saves them, its tail included."""
    tokens = np.asarray(tokens, np.int32)
    where = (model, namespace.encode(), group, shard)
    parent, chained = ("root", where), []
    for start in range(0, len(tokens), size):
        own = tokens[start : start + size]
        name = ("prompt", where, tokens[: start + size].tobytes())
        one = block(name, parent, tokens=own, namespace=namespace.tag(), model=model, group=group)
        chained.append(one)
        parent = name
    return chained
