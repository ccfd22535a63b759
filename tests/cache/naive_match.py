"""A naive model of matching: what of a prompt the pools hold (specification: block manager, 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Match:
    """The nodes matched whole; the partial source or None; tokens matched in all."""

    path: list[Any]
    source: Any
    length: int


def first_block(pool, length, size):
    """The first block that `pool` needs for position `length`."""
    return 0 if pool.window is None else max(0, length - pool.window + 1) // size


def reached(root, tokens, limit, size):
    """The nodes of the whole blocks of the first `limit` tokens, whether resident or not."""
    path, node = [], root
    while (len(path) + 1) * size <= limit:
        node = node.child(tokens[len(path) * size : (len(path) + 1) * size])
        if node is None:
            break
        path.append(node)
    return path


def usable(pools, nodes, length, size):
    """Whether every pool holds what position `length` needs; `nodes` reach that far."""
    if length % size and any(pool.is_state for pool in pools):
        return False
    return all(
        pool in nodes[number].blocks
        for pool in pools
        for number in range(first_block(pool, length, size), len(nodes))
    )


def longest_whole(pools, root, tokens, limit, size):
    path = reached(root, tokens, limit, size)
    while not usable(pools, path, len(path) * size, size):
        path.pop()
    return Match(path, None, len(path) * size)


def longest(pools, root, tokens, limit, size, *, copy):
    """The longest match, whole or partial. Without `copy` a source must be free for the taking."""
    best = longest_whole(pools, root, tokens, limit, size)
    key = (best.length,)
    path = reached(root, tokens, limit, size)
    for depth in range(len(path) + 1):
        rest = tokens[depth * size : limit]
        for child in (path[depth - 1] if depth else root).children:
            shared = 0
            while shared < min(len(rest), len(child.tokens)) and (
                rest[shared] == child.tokens[shared]
            ):
                shared += 1
            taken = child.children or any(block.holders for block in child.blocks.values())
            if shared in (0, size) or (taken and not copy):
                continue
            length = depth * size + shared
            if not usable(pools, [*path[:depth], child], length, size):
                continue
            first = child.blocks[pools[0]]
            mine = (length, first.primary is not None, *first.age())
            if mine > key:
                best, key = Match(path[:depth], child, length), mine
    return best
