"""Runs are a shorter way to say which byte goes where."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.kernels.blocks.runs import RunTable
from kvconnect.kernels.blocks.strips import PlaneBytes, PlanePair, make_strips

SMALL = st.sampled_from([0, 0, 0, 1, 2, 3, 4])


@st.composite
def planes(draw, tokens, heads, row, tokens_first):
    """Where a plane lies, with gaps behind rows, heads and tokens."""
    inner = row + draw(SMALL)
    outer = inner * (heads if tokens_first else tokens) + draw(SMALL)
    whole = outer * (tokens if tokens_first else heads)
    token, head = (outer, inner) if tokens_first else (inner, outer)
    return token, head, whole


@st.composite
def memories(draw, rows, tokens, heads, tokens_first):
    """Planes one after the other in blocks, often without anything between them."""
    sizes = [draw(planes(tokens, heads, row, tokens_first)) for row in rows]
    if draw(st.booleans()):  # all alike, as caches are
        sizes = [sizes[0]] * len(rows) if len(set(rows)) == 1 else sizes
    gap = draw(SMALL)
    step = sum(whole + gap for _, _, whole in sizes) + draw(SMALL)
    offset, found = draw(st.integers(0, 3)), []
    for row, (token, head, whole) in zip(rows, sizes, strict=True):
        found.append(
            PlaneBytes(offset, step, token, head, row, draw(st.sampled_from([0, 0, 0, 0, 0, 1])))
        )
        offset += whole + gap
    return found


@settings(max_examples=200, deadline=None)
@given(st.data(), st.booleans(), st.booleans())
def test_every_byte_goes_where_its_plane_says_for_every_number_of_tokens(
    data, tokens_first, by_token
):
    tokens, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    rows = data.draw(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=3))
    sides = [data.draw(memories(rows, tokens, heads, tokens_first)) for _ in range(2)]
    pairs = [PlanePair(*pair) for pair in zip(*sides, strict=True)]
    strips = make_strips(pairs, tokens, heads, tokens_first=tokens_first, by_token=by_token)
    table = RunTable(strips)
    for count in range(1, tokens + 1) if by_token else [tokens]:
        part = table.prefix(count) if by_token else table
        assert copied(part) == expected(pairs, count, heads)
    assert table.num_runs == len(table.runs)
    assert table.nbytes == sum(rows) * tokens * heads
    if by_token:
        clamped = [
            min(max(count - first, 0), nbytes // size) * size
            for count in range(1, tokens + 1)
            for *_, nbytes, first, size in table.run_list
        ]
        assert sum(clamped) == sum(table.prefix(count).nbytes for count in range(1, tokens + 1))


def copied(table):
    """Which byte goes where, of blocks 0 and 2, and out of and into which memories."""
    found = set()
    for strip in table.strips:
        for run in range(strip.count):
            ends = [side.offset + run * side.spacing for side in (strip.source, strip.target)]
            for block in (0, 2):
                for byte in range(strip.nbytes):
                    found.add(
                        tuple(
                            (side.memory, start + block * side.step + byte)
                            for side, start in zip((strip.source, strip.target), ends, strict=True)
                        )
                    )
    return found


def expected(pairs, num_tokens, heads):
    return {
        tuple(
            (
                side.memory,
                side.offset + block * side.block + token * side.token + head * side.head + byte,
            )
            for side in (pair.source, pair.target)
        )
        for pair in pairs
        for block in (0, 2)
        for token in range(num_tokens)
        for head in range(heads)
        for byte in range(pair.source.row)
    }


def test_a_run_is_never_longer_than_a_gibibyte():
    half = 1 << 29
    pairs = [
        PlanePair(*[PlaneBytes(layer * half, 1 << 34, half, half, half)] * 2) for layer in range(5)
    ]
    strips = make_strips(pairs, 1, 1, tokens_first=True, by_token=False)
    assert sum(strip.count * strip.nbytes for strip in strips) == 5 * half
    assert max(strip.nbytes for strip in strips) == 1 << 30


def test_planes_that_follow_each_other_with_other_distances_are_apart():
    sides = [
        [PlaneBytes(0, 100, 6, 3, 2), PlaneBytes(12, 100, 10, 5, 2)],
        [PlaneBytes(0, 100, 6, 3, 2), PlaneBytes(12, 100, 8, 4, 2)],
    ]
    pairs = [PlanePair(*pair) for pair in zip(*sides, strict=True)]
    table = RunTable(make_strips(pairs, 2, 2, tokens_first=True, by_token=False))
    assert copied(table) == expected(pairs, 2, 2)


def test_even_distances_on_one_side_are_not_enough():
    pair = PlanePair(PlaneBytes(0, 100, 8, 4, 2), PlaneBytes(0, 100, 8, 2, 2))
    table = RunTable(make_strips([pair], 2, 2, tokens_first=True, by_token=False))
    assert copied(table) == expected([pair], 2, 2)
