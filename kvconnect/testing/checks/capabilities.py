"""Checks that a backend does what it declares."""

from __future__ import annotations

from dataclasses import fields

from kvconnect.backend import MAX_CHILDREN, Backend, Capabilities, Child, StoredBlock
from kvconnect.errors import ConfigurationError, RetryLater
from kvconnect.keys import BlockKey
from kvconnect.testing.check import check, demand
from kvconnect.testing.checks.contract import expect_stored
from kvconnect.testing.subject import Subject


@check("capabilities")
async def declared(subject: Subject) -> None:
    """The `capabilities` are a `Capabilities` whose fields are all of the right type."""
    can: object = subject.capabilities()
    demand(isinstance(can, Capabilities), f"capabilities is {can!r}, not a Capabilities")
    for field in fields(Capabilities):
        value = getattr(can, field.name)
        if field.name != "max_value_bytes":
            demand(isinstance(value, bool), f"{field.name} is {value!r}, not True or False")
        else:
            fine = value is None or (isinstance(value, int) and value > 0)
            demand(fine, f"{field.name} is {value!r}, not bytes or None")


@check("capabilities")
async def durable(subject: Subject) -> None:
    """A backend that is `durable` has all blocks after it was closed and made anew."""
    subject.require("durable")
    async with subject.prepared("durable", 12) as (store, blocks, keys):
        await store.save(blocks.chain(keys, tokens=[1, 2]))
        await store.delete([keys[-1]])
    for _ in range(2):
        async with subject.opened() as store:
            await expect_stored(store, blocks, keys[:-1])
            demand(await store.lookup([keys[-1]]) == 0, "a deleted block came back")


@check("capabilities")
async def max_value_bytes(subject: Subject) -> None:
    """A value longer than `max_value_bytes` is refused clearly, and no part of it is stored."""
    longest = subject.capabilities().max_value_bytes
    if longest is None:
        subject.require("max_value_bytes")
        return
    async with subject.prepared("max value", 2) as (store, blocks, (key, after)):
        try:
            saved = await store.save([blocks.block(key, nbytes=longest + 1)])
            demand(saved == 0, f"{longest + 1} bytes were stored: max_value_bytes is not true")
        except (RetryLater, ConfigurationError):
            pass
        demand(await store.lookup([key]) == 0, "a value that was refused is found")
        demand(await store.save([blocks.block(after)]) == 1, "saves fail after a refused one")


@check("capabilities")
async def scan(subject: Subject) -> None:
    """The `scan` of an `enumerable` backend lists each block once, with its size."""
    subject.require("enumerable")
    async with subject.prepared("scan", 40) as (store, blocks, keys):
        await store.save([blocks.block(key, priority=7) for key in keys])
        await store.delete(keys[:4])
        mine = [entry async for entry in store.scan() if entry.key in keys]
        listed = sorted(entry.key for entry in mine)
        demand(listed == sorted(set(listed)), "scan lists a block twice")
        demand(listed == sorted(keys[4:]), f"scan lists {len(listed)} of 36 blocks")
        sizes = {entry.nbytes for entry in mine}
        demand(
            sizes == {blocks.frame_nbytes}, f"scan says {sizes} bytes, not {blocks.frame_nbytes}"
        )


@check("capabilities")
async def children(subject: Subject) -> None:
    """The `children` of an `enumerable` backend are the blocks under their parent, with tokens."""
    subject.require("enumerable")
    async with subject.prepared("children", 5) as (store, blocks, keys):
        outside, root, full, tail, other = keys
        await store.save(
            [
                blocks.block(root, outside, tokens=[1, 2]),
                blocks.block(full, root, tokens=[3, 4]),
                blocks.block(tail, root, tokens=[3]),
                blocks.block(other, full, tokens=[-7, 2**31 - 1]),
            ]
        )
        demand(
            await _tokens(store, root) == {full: [3, 4], tail: [3]},
            f"children of a block with two are {await _tokens(store, root)}",
        )
        demand(await _tokens(store, full) == {other: [-7, 2**31 - 1]}, "an only child is wrong")
        demand(await _tokens(store, outside) == {root: [1, 2]}, "children of an unstored parent")
        demand(await _tokens(store, other) == {}, "a block without children has some")
        await store.delete([tail])
        demand(await _tokens(store, root) == {full: [3, 4]}, "a deleted child is still listed")


async def _tokens(store: Backend, key: BlockKey) -> dict[BlockKey, list[int]]:
    found: list[Child] = list(await store.children(key))
    return {child.key: child.tokens.tolist() for child in found}


@check("capabilities")
async def many_children(subject: Subject) -> None:
    """The last of more than `MAX_CHILDREN` children are listed, and no more than that."""
    subject.require("enumerable")
    blocks = subject.blocks("many children")
    root, keys = blocks.key("root"), blocks.keys(count=MAX_CHILDREN + 20)
    async with subject.opened() as store:
        for start in range(0, len(keys), 46):
            await store.save(
                [
                    StoredBlock(one.key, one.data, root, one.tokens)
                    for one in blocks.chain(keys[start : start + 46], nbytes=1, tokens=[1])
                ]
            )
        listed = [child.key for child in await store.children(root)]
        demand(len(listed) <= MAX_CHILDREN, f"{len(listed)} children are listed")
        demand(keys[-1] in listed, "the child that was stored last is not listed")


@check("capabilities")
async def stats(subject: Subject) -> None:
    """The ``blocks`` and ``bytes`` of `stats`, where they are given, follow saves and deletes."""
    async with subject.prepared("stats", 8) as (store, blocks, keys):
        before = dict(await store.stats())
        await store.save(blocks.chain(keys))
        full = dict(await store.stats())
        await store.delete(keys)
        after = dict(await store.stats())
    for name, least in (("blocks", 8), ("bytes", 8 * blocks.frame_nbytes)):
        if name in before:
            grew = full[name] - before[name]
            demand(grew >= least, f"stats: {name} grew by {grew} for 8 blocks")
            demand(
                after[name] == before[name], f"stats: {name} is {after[name]} after deleting all"
            )
