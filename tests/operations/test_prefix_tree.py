"""The prefix tree of a listed store, against one made of dicts."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from kvconnect.backend import StoredEntry
from kvconnect.operations.prefix_tree import PrefixTree


def key_of(number: int) -> bytes:
    return bytes([number + 1]) * 32


def entry(number: int, parent: int | None = None, **fields) -> StoredEntry:
    tokens = np.arange(fields.pop("tokens", 4), dtype=np.int32)
    fields = {"nbytes": 100, "priority": 35, "created_at": 5.0, "used_at": 6.0} | fields
    before = None if parent is None else key_of(parent)
    return StoredEntry(key_of(number), parent=before, tokens=tokens, **fields)


def tree_of(*entries: StoredEntry) -> PrefixTree:
    builder = PrefixTree.Builder()
    for one in entries:
        builder.add(one)
    return builder.build()


def everything(tree: PrefixTree, node: int | None) -> list[object]:
    """All rows below `node`, with those below each."""
    found = tree.rows(node, 0, 10_000)
    assert found.more == 0
    return [(row, everything(tree, row.node)) for row in found.rows]


def only(rows):
    ((row, below),) = rows
    return row, below


# ------------------------------------------------------------------------------------- examples


def test_an_empty_store_has_no_rows():
    tree = tree_of()
    assert (tree.num_blocks, len(tree), everything(tree, None)) == (0, 0, [])


def test_blocks_without_a_fork_are_one_branch_in_the_order_of_the_prompt():
    tree = tree_of(entry(2, 1), entry(0, 9), entry(1, 0, tokens=3))
    space, below = only(everything(tree, None))
    assert (space.run_blocks, space.blocks, space.branches) == (0, 3, 1)
    row, below = only(below)
    assert (row.run_blocks, row.run_tokens, row.blocks, row.bytes) == (3, 11, 3, 300)
    assert below == []
    assert tree.keys_of(row.node, 2) == [key_of(0), key_of(1)]
    assert tree.keys_of(row.node, 99) == [key_of(0), key_of(1), key_of(2)]
    assert tree.keys_of(space.node, 99) == []


def test_a_fork_divides_a_branch_and_its_numbers_include_what_follows():
    tree = tree_of(
        entry(0, hits=5, created_at=1.0, used_at=9.0),
        entry(1, 0, hits=3, nbytes=10),
        entry(2, 0, hits=1, nbytes=70, pinned_until=1e12),
        entry(3, 2, hits=1, used_at=20.0),
    )
    _, below = only(everything(tree, None))
    row, below = only(below)
    assert (row.run_blocks, row.blocks, row.bytes, row.hits) == (1, 4, 280, 10)
    assert (row.pinned_blocks, row.created_at, row.used_at, row.branches) == (1, 1.0, 20.0, 2)
    assert [(one.run_blocks, one.bytes) for one, _ in below] == [(2, 170), (1, 10)]


def test_models_tenants_and_groups_are_apart_and_the_largest_comes_first():
    tree = tree_of(
        entry(0, nbytes=1),
        entry(1, 0, nbytes=2, model=b"m"),
        entry(2, nbytes=9, namespace=b"n"),
        entry(3, nbytes=5, group=1),
    )
    spaces = [
        (row.space.model, row.space.namespace, row.space.group) for row, _ in everything(tree, None)
    ]
    assert spaces == [(b"", b"n", 0), (b"", b"", 1), (b"m", b"", 0), (b"", b"", 0)]


def test_branches_come_in_parts():
    tree = tree_of(*(entry(number, nbytes=200 - number) for number in range(7)))
    ((space, _),) = everything(tree, None)
    found = tree.rows(space.node, 0, 3)
    assert ([row.bytes for row in found.rows], found.more) == ([200, 199, 198], 4)
    found = tree.rows(space.node, 6, 3)
    assert ([row.bytes for row in found.rows], found.more) == ([194], 0)
    assert tree.rows(space.node, 7, 3).rows == []
    assert tree.rows(space.node, 10**15, 3).more == 0


def test_blocks_without_counts_have_none():
    (space, _) = only(everything(tree_of(entry(0), entry(1, 0)), None))
    assert space.hits is None
    (space, _) = only(everything(tree_of(entry(0), entry(1, 0, hits=0)), None))
    assert space.hits == 0


def test_circles_of_a_damaged_store_are_beginnings():
    tree = tree_of(entry(0, 0), entry(1, 2), entry(2, 3), entry(3, 1), entry(4, 3))
    space, below = only(everything(tree, None))
    assert (space.blocks, len(below)) == (5, 5)


def test_numbers_of_a_damaged_store_do_not_overflow():
    tree = tree_of(entry(0, nbytes=1 << 200, hits=1 << 200), entry(1, 0, nbytes=1 << 200))
    space, _ = only(everything(tree, None))
    assert 0 < space.bytes < 1 << 63


def test_a_long_chain_of_forks():
    """Each turn of a conversation forks: as many levels as turns."""
    builder = PrefixTree.Builder()
    size = 3000
    for number in range(size):
        for side in (0, 1):
            key = number.to_bytes(4) + bytes([side]) * 28
            parent = None if number == 0 else (number - 1).to_bytes(4) + bytes(28)
            builder.add(StoredEntry(key, 1, 35, 0.0, 0.0, parent=parent))
    tree = builder.build()
    (space,) = tree.rows(None, 0, 2).rows
    assert space.blocks == tree.num_blocks == 2 * size
    node = space.node
    for depth in range(size):
        first, second = tree.rows(node, 0, 5).rows
        assert (first.blocks, second.blocks) == (2 * (size - depth) - 1, 1)
        node = first.node


# ------------------------------------------------------------------------------------- at random


@st.composite
def stores(draw):
    size = draw(st.integers(0, 25))
    return [
        entry(
            draw(st.integers(0, size)),
            draw(st.none() | st.integers(0, size + 2)),
            nbytes=draw(st.integers(0, 9)),
            tokens=draw(st.integers(0, 3)),
            hits=draw(st.none() | st.integers(0, 3)),
            pinned_until=draw(st.sampled_from([0.0, 7.0])),
            used_at=float(draw(st.integers(0, 9))),
            created_at=float(draw(st.integers(0, 9))),
            namespace=draw(st.sampled_from([b"a", b"b"])),
        )
        for _ in range(size)
    ]


def naive(entries):
    """The same rows as nested tuples of numbers, made by following parents one by one."""
    blocks = {}
    for one in entries:
        blocks.setdefault(one.key, one)

    def parent(one):
        found = blocks.get(one.parent)
        if found is None or found is one or found.namespace != one.namespace:
            return None
        return found

    def has_beginning(one):
        seen = set()
        while one is not None and one.key not in seen:
            seen.add(one.key)
            one = parent(one)
        return one is None

    children, roots = defaultdict(list), defaultdict(list)
    for one in blocks.values():
        if has_beginning(one) and parent(one) is not None:
            children[one.parent].append(one)
        else:
            roots[one.namespace].append(one)
    # Below a circle each block begins a prompt: it has no child either.
    for one in blocks.values():
        children[one.key] = [child for child in children[one.key] if has_beginning(child)]

    def below(one):
        return [one, *(more for child in children[one.key] for more in below(child))]

    def branch(one):
        run = [one]
        while len(children[run[-1].key]) == 1:
            run.append(children[run[-1].key][0])
        rows = [branch(child) for child in children[run[-1].key]]
        return (len(run), *numbers(below(one)), tuple(sorted(rows, key=repr)))

    return sorted(
        (
            (
                0,
                *numbers([more for one in found for more in below(one)]),
                tuple(sorted(map(branch, found), key=repr)),
            )
            for found in roots.values()
        ),
        key=repr,
    )


def numbers(blocks):
    hits = [one.hits for one in blocks if one.hits is not None]
    return (
        len(blocks),
        sum(len(one.tokens) for one in blocks),
        sum(one.nbytes for one in blocks),
        sum(hits) if hits else None,
        sum(one.pinned_until > 0 for one in blocks),
        min(one.created_at for one in blocks),
        max(one.used_at for one in blocks),
    )


def as_numbers(tree, node):
    found = []
    for row, _ in everything(tree, node):
        below = as_numbers(tree, row.node)
        assert row.branches == len(below)
        found.append(
            (
                row.run_blocks,
                row.blocks,
                row.tokens,
                row.bytes,
                row.hits,
                row.pinned_blocks,
                row.created_at,
                row.used_at,
                tuple(below),
            )
        )
    return sorted(found, key=repr)


@given(stores())
@example([entry(1, namespace=b"a"), entry(1, namespace=b"b")])
def test_any_store_has_the_rows_that_following_parents_finds(entries):
    tree = tree_of(*entries)
    assert as_numbers(tree, None) == naive(entries)
    assert tree.num_blocks == len({one.key for one in entries})
