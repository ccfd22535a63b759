"""The prefix tree of a listed store, in arrays, with sums of every branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from kvconnect.backend import StoredEntry
from kvconnect.keys import KEY_NBYTES, BlockKey

_Array: TypeAlias = np.ndarray[Any, Any]

_BLOCK = np.dtype(
    [
        ("key", f"V{KEY_NBYTES}"),
        ("parent", f"V{KEY_NBYTES}"),
        ("space", np.int32),
        ("tokens", np.int32),
        ("hits", np.int64),  # -1: not counted
        ("bytes", np.int64),
        ("pinned", np.int64),
        ("created_at", np.float64),
        ("used_at", np.float64),
    ]
)
_LARGEST = 1 << 42
"""Larger numbers of a single block are a damaged store's, and their sums might not fit."""
_PART = 4096
"""The blocks that are kept as objects until they become a part of an array."""


@dataclass(frozen=True, slots=True)
class Space:
    """The blocks that may follow each other: of one model and geometry, namespace, pool group."""

    model: bytes
    namespace: bytes
    group: int


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A branch of the tree: blocks that follow each other without a fork, and all that follow them.

    Attributes:
        node: its number in this tree.
        space: whose blocks these are.
        run_blocks, run_tokens: of the branch itself, up to where it divides or ends. A space has
            none.
        blocks, tokens, bytes, hits, pinned_blocks: those of the branch and of all that follows it.
            `hits` is ``None`` if none of the blocks has a count.
        created_at, used_at: Unix seconds, of the oldest block and of the last use among them.
        branches: how many branches follow it.
    """

    node: int
    space: Space
    run_blocks: int
    run_tokens: int
    blocks: int
    tokens: int
    bytes: int
    hits: int | None
    pinned_blocks: int
    created_at: float
    used_at: float
    branches: int


@dataclass(frozen=True, slots=True)
class TreeRows:
    """A part of the branches that follow a node, those with most bytes first.

    Attributes:
        rows: of this part.
        more: how many come after them.
    """

    rows: Sequence[TreeRow]
    more: int


class PrefixTree:
    """The prefix tree of a store. Its numbers do not change.

    The first level are the spaces. Below a space are the branches that begin a prompt, or whose
    beginning is not stored. A parent that would make a circle, or is of another space, which only a
    damaged or hostile store has, counts as not stored.

    Attributes:
        num_blocks: all of them.
    """

    class Builder:
        """Collects blocks, some 120 bytes each, and makes the tree."""

        def __init__(self) -> None:
            self._spaces: dict[tuple[bytes, bytes, int], int] = {}
            self._waiting: list[tuple[object, ...]] = []
            self._parts: list[_Array] = []

        def add(self, entry: StoredEntry) -> None:
            """Adds a block. Of several with one key, one counts: the first that was added."""
            space = (entry.model, entry.namespace, entry.group)
            self._waiting.append(
                (
                    entry.key,
                    entry.key if entry.parent is None else entry.parent,
                    self._spaces.setdefault(space, len(self._spaces)),
                    0 if entry.tokens is None else len(entry.tokens),
                    -1 if entry.hits is None else min(entry.hits, _LARGEST),
                    min(entry.nbytes, _LARGEST),
                    entry.pinned_until > 0,
                    entry.created_at,
                    entry.used_at,
                )
            )
            if len(self._waiting) == _PART:
                self._flush()

        def build(self) -> PrefixTree:
            """Returns the tree; takes about a second for each million blocks."""
            self._flush()
            blocks = np.concatenate([np.empty(0, _BLOCK), *self._parts])
            self._parts.clear()
            return PrefixTree(blocks, [Space(*one) for one in self._spaces])

        def _flush(self) -> None:
            self._parts.append(np.array(self._waiting, _BLOCK))
            self._waiting.clear()

    def __init__(self, blocks: _Array, spaces: Sequence[Space]) -> None:
        self._spaces = spaces
        blocks, parent = _linked(blocks)
        self.num_blocks = len(blocks)
        up, depth = _without_circles(parent)
        run, heads = _runs(up)
        # The blocks of each run, in the order of the prompt.
        order = np.lexsort((depth, run))
        self._keys = blocks["key"][order]
        self._starts = np.searchsorted(run[order], np.arange(len(heads) + 1))
        num_spaces = len(spaces)
        above = np.where(up[heads] < 0, blocks["space"][heads], num_spaces + run[up[heads]])
        own = _sums(blocks, run, len(heads))
        self._own = {name: own[name] for name in ("blocks", "tokens")}
        self._columns = _with_descendants(own, above, num_spaces, depth[heads])
        space = blocks["space"][heads]
        self._space_of = np.concatenate([np.arange(num_spaces), space]).astype(np.int32)
        self._children = np.lexsort((-self._columns["bytes"][num_spaces:], above)) + num_spaces
        self._child_starts = np.searchsorted(np.sort(above), np.arange(num_spaces + len(heads) + 1))
        first = np.argsort(-self._columns["bytes"][:num_spaces], kind="stable")
        # A space has no block if each of its keys was added in another one before.
        self._first = first[self._columns["blocks"][first] > 0]

    def __len__(self) -> int:
        """The number of nodes."""
        return len(self._space_of)

    def rows(self, node: int | None, start: int, limit: int) -> TreeRows:
        """Returns the branches ``start..start + limit`` that follow `node`; ``None``: the spaces.

        Takes time for these rows alone. `node` is one of this tree.
        """
        found = self._first if node is None else self._children[self._below(node)]
        rows = [self._row(int(one)) for one in found[start : start + limit]]
        return TreeRows(rows, max(0, len(found) - start - len(rows)))

    def keys_of(self, node: int, most: int) -> list[BlockKey]:
        """Returns the store keys of the first blocks of a branch, at most so many."""
        at = node - len(self._spaces)
        if at < 0:
            return []
        first, end = int(self._starts[at]), int(self._starts[at + 1])
        found: list[BlockKey] = self._keys[first : min(end, first + most)].tolist()
        return found

    def _below(self, node: int) -> slice:
        return slice(int(self._child_starts[node]), int(self._child_starts[node + 1]))

    def _row(self, node: int) -> TreeRow:
        all_of = {name: column[node].item() for name, column in self._columns.items()}
        below = self._below(node)
        at = node - len(self._spaces)
        return TreeRow(
            node=node,
            space=self._spaces[self._space_of[node]],
            run_blocks=0 if at < 0 else int(self._own["blocks"][at]),
            run_tokens=0 if at < 0 else int(self._own["tokens"][at]),
            blocks=all_of["blocks"],
            tokens=all_of["tokens"],
            bytes=all_of["bytes"],
            hits=all_of["hits"] if all_of["counted"] else None,
            pinned_blocks=all_of["pinned"],
            created_at=all_of["created_at"],
            used_at=all_of["used_at"],
            branches=below.stop - below.start,
        )


def _linked(blocks: _Array) -> tuple[_Array, _Array]:
    """Returns the blocks, each once, and the index of the parent of each; -1: it is not stored.

    Keys are compared by their first 64 bits, and parents then by all of them.
    """
    short = _short(blocks["key"])
    short, first = np.unique(short, return_index=True)
    blocks = blocks[first]
    if not len(blocks):
        return blocks, np.empty(0, np.int64)
    at = np.minimum(np.searchsorted(short, _short(blocks["parent"])), len(short) - 1)
    found = (blocks["key"][at] == blocks["parent"]) & (blocks["space"][at] == blocks["space"])
    found &= at != np.arange(len(at))  # one that is its own parent has none
    return blocks, np.where(found, at, -1)


def _short(keys: _Array) -> _Array:
    found: _Array = np.ascontiguousarray(keys).view(np.uint64).reshape(-1, KEY_NBYTES // 8)[:, 0]
    return found


def _without_circles(parent: _Array) -> tuple[_Array, _Array]:
    """Returns the parents without those of blocks that no root is above, and each block's depth."""
    jump = parent.copy()
    depth = (parent >= 0).astype(np.int64)
    for _ in range(max(1, len(parent)).bit_length()):
        going = np.flatnonzero(jump >= 0)
        if not len(going):
            return parent, depth
        depth[going] += depth[jump[going]]
        jump[going] = jump[jump[going]]
    endless = jump >= 0
    depth[endless] = 0
    return np.where(endless, -1, parent), depth


def _runs(up: _Array) -> tuple[_Array, _Array]:
    """Returns the number of each block's run, and the first block of each run.

    A run begins at a root and behind a fork.
    """
    size = len(up)
    following = np.bincount(up[up >= 0], minlength=size)
    begins = (up < 0) | (following[up] != 1)
    head = np.where(begins, np.arange(size), up)
    for _ in range(max(1, size).bit_length()):
        head = head[head]
    heads = np.flatnonzero(begins)
    number = np.full(size, -1, np.int64)
    number[heads] = np.arange(len(heads))
    return number[head], heads


def _sums(blocks: _Array, run: _Array, size: int) -> dict[str, _Array]:
    """Returns the sums of each run, and the oldest and latest times."""
    hits = blocks["hits"]
    weights = {
        "blocks": np.ones(len(blocks)),
        "tokens": blocks["tokens"],
        "hits": np.maximum(hits, 0),
        "counted": hits >= 0,
        "bytes": blocks["bytes"],
        "pinned": blocks["pinned"],
    }
    found = {
        # Sums are exact below 2**53.
        name: np.bincount(run, weights=one, minlength=size).astype(np.int64)
        for name, one in weights.items()
    }
    found["created_at"] = np.full(size, np.inf)
    found["used_at"] = np.full(size, -np.inf)
    np.minimum.at(found["created_at"], run, blocks["created_at"])
    np.maximum.at(found["used_at"], run, blocks["used_at"])
    return found


def _with_descendants(
    own: dict[str, _Array], above: _Array, num_spaces: int, depth: _Array
) -> dict[str, _Array]:
    """Returns the columns of spaces and runs, each with those of all runs below it.

    `depth` is that of the first block of each run.
    """
    columns = {
        name: np.concatenate([np.full(num_spaces, start), column])
        for name, column in own.items()
        for start in [{"created_at": np.inf, "used_at": -np.inf}.get(name, 0)]
    }
    # The deepest first, all of one depth at once: what a run has below it is complete then.
    order = np.argsort(-depth, kind="stable")
    ends = np.flatnonzero(np.diff(depth[order])) + 1
    for level in np.split(order, ends):
        nodes, to = level + num_spaces, above[level]
        for name, column in columns.items():
            add = {"created_at": np.minimum, "used_at": np.maximum}.get(name, np.add)
            add.at(column, to, column[nodes])
    return columns
