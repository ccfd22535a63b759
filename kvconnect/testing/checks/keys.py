"""Checks keys: their ingredients, and that a backend distinguishes them."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np

from kvconnect.backend import StoredBlock
from kvconnect.keys import BlockKey
from kvconnect.testing.check import check, demand
from kvconnect.testing.checks.contract import expect_stored
from kvconnect.testing.key_variants import digest, variants
from kvconnect.testing.processes import children
from kvconnect.testing.subject import Subject


@check("keys")
async def every_ingredient(subject: Subject) -> None:
    """A block of another model, dtype, shard, layout, chunking, salt or adapter is not found."""
    named = variants()
    for (one, key), (other, its) in itertools.combinations(named.items(), 2):
        demand(key != its, f"the keys of another {one} and of another {other} are equal")
    blocks = subject.blocks("ingredients")
    async with subject.opened() as store:
        await store.delete(list(named.values()))
        await store.save([blocks.block(named["nothing"], nbytes=512)])
        for ingredient, key in list(named.items())[1:]:
            found = await store.lookup([key])
            demand(not found, f"a block of another {ingredient} is found")
        await store.delete([named["nothing"]])


@check("keys", limit_s=180)
async def same_in_every_process(subject: Subject) -> None:
    """Keys are the same in a process with another ``PYTHONHASHSEED``."""
    told = await asyncio.to_thread(lambda: children.start(subject, "keys_of_everything").wait())
    demand(told[0]["digest"] == digest(), "another process makes other keys of the same tokens")


@check("keys")
async def another_salt_never_hits(subject: Subject) -> None:
    """A store behind the framework finds no block under another salt."""
    blocks = subject.blocks("salt")
    mine, theirs = variants()["salt"], variants()["another salt"]
    async with subject.guarded() as store:
        await store.delete([mine, theirs])
        await store.save([blocks.block(mine)])
        demand(await store.lookup([mine]) == 1, "a block is not found under its own salt")
        demand(await store.lookup([theirs]) == 0, "a block is found under another salt")
        demand(
            await store.load([theirs], blocks.buffers(1)) == 0, "another tenant's block is loaded"
        )
        await store.delete([mine])


@check("keys")
async def all_bits_count(subject: Subject) -> None:
    """Keys that differ in one bit, wherever it is, are different blocks."""
    blocks = subject.blocks("bits")
    base = blocks.key("base")
    keys = [base]
    for byte in range(32):
        changed = bytearray(base)
        changed[byte] ^= 1 << (byte % 8)
        keys.append(BlockKey(bytes(changed)))
    # Flips the case of a letter, if keys are stored as text.
    keys += [BlockKey(b"a" * 32), BlockKey(b"A" * 32)]
    async with subject.opened() as store:
        await store.delete(keys)
        for start in range(0, len(keys), 2):
            await store.save([blocks.block(key, nbytes=256) for key in keys[start : start + 1]])
        for number, key in enumerate(keys):
            found = await store.lookup([key])
            demand(found == (number + 1) % 2, "two keys that differ in one bit are one block")
        await store.save([blocks.block(key, nbytes=256) for key in keys])
        await expect_stored(store, blocks, keys, nbytes=256)
        await store.delete(keys)


@check("keys")
async def alike(subject: Subject) -> None:
    """Keys that agree in their first or last 8, 16 or 24 bytes are different blocks."""
    blocks = subject.blocks("alike")
    base = blocks.key("base")
    others = [blocks.key("other", number) for number in range(6)]
    keys = [base]
    for nbytes, first, last in zip((8, 16, 24), others[:3], others[3:], strict=True):
        keys.append(BlockKey(base[:nbytes] + first[nbytes:]))
        keys.append(BlockKey(last[:-nbytes] + base[-nbytes:]))
    async with subject.opened() as store:
        await store.delete(keys)
        for number, key in enumerate(keys):
            demand(await store.lookup([key]) == 0, "a key that agrees in part with another is one")
            demand(await store.save([blocks.block(key, nbytes=256)]) == 1, f"key {number}: no room")
        await expect_stored(store, blocks, keys, nbytes=256)
        await store.delete(keys[1:])
        await expect_stored(store, blocks, keys[:1], nbytes=256)
        await store.delete(keys)


@check("keys")
async def any_bytes(subject: Subject) -> None:
    """Keys may be any 32 bytes: zeros, line ends, quotes, slashes, dots, wildcards."""
    blocks = subject.blocks("bytes")
    odd = (b"\0", b"\xff", b"\n", b"\r\n", b"'\"", b"../", b"*?[a]", b"%s{}", b" ", b"\\", b":;|")
    keys = [BlockKey((part * 32)[:32]) for part in odd]
    keys += [BlockKey(bytes(31) + b"\1"), BlockKey(b"\1" + bytes(31))]
    async with subject.opened() as store:
        await store.delete(keys)
        saved = await store.save([blocks.block(key, nbytes=256) for key in keys])
        demand(saved == len(keys), f"only {saved} of {len(keys)} odd keys could be stored")
        await expect_stored(store, blocks, keys, nbytes=256)
        await store.delete(keys[:1])
        demand(await store.lookup(keys[:1]) == 0, "a key of zeros cannot be deleted")
        await expect_stored(store, blocks, keys[1:], nbytes=256)
        await store.delete(keys)


@check("keys")
async def keys_are_not_copied(subject: Subject) -> None:
    """A block's key is taken from the block, not from its content or tokens."""
    async with subject.prepared("same content", 2) as (store, blocks, (one, other)):
        data = blocks.block(one, nbytes=4096).data
        await store.save([StoredBlock(one, data, None, np.arange(16, dtype=np.int32))])
        demand(await store.lookup([other]) == 0, "equal content under another key is found")
        await store.save([StoredBlock(other, data, None, np.arange(16, dtype=np.int32))])
        await store.delete([one])
        demand(await store.lookup([other]) == 1, "deleting a block deleted one of equal content")
