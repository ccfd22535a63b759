"""The runs of bytes that are contiguous on both sides of a copy between paged memories.

Every copy between blocks (gather, scatter, copy, single layers, the first tokens of a block) is the
same few runs for every pair of blocks, at addresses ``offset + block * step``. They are computed
once per pair of layouts and kept. A call adds only block ids and origins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_MAX_RUN = 1 << 30
"""The largest size of merged runs, so that lengths fit into 32 bits everywhere."""


@dataclass(frozen=True, slots=True)
class PlaneBytes:
    """The location of one layer's keys, or its values. All in bytes.

    Attributes:
        offset: the distance of block 0 from the origin.
        block, token, head: strides.
        row: the size of one head's elements of one token, which are contiguous.
        memory: the index of its memory at the owner; runs are merged within one memory only.
    """

    offset: int
    block: int
    token: int
    head: int
    row: int
    memory: int = 0


@dataclass(frozen=True, slots=True)
class PlanePair:
    """A plane of the source and its target plane; their rows are equally long."""

    source: PlaneBytes
    target: PlaneBytes


@dataclass(frozen=True, slots=True)
class Side:
    """The locations of the runs of a strip on one side. All in bytes.

    Attributes:
        offset: the place of the first run in block 0.
        spacing: the distance from one run to the next within a block.
        step: the distance from one block to the next.
        memory: as in `PlaneBytes`.
    """

    offset: int
    spacing: int
    step: int
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Strip:
    """A series of equal runs, evenly spaced on both sides.

    Attributes:
        source, target: the locations of the runs on both sides.
        count: the number of runs in a block.
        nbytes: the size of a run.
        token_nbytes: the size of one token in a run; `nbytes` if no prefixes are copied.
        across: whether each run is one token, from token 0 on, instead of all tokens.
    """

    source: Side
    target: Side
    count: int
    nbytes: int
    token_nbytes: int
    across: bool = False

    def prefix(self, num_tokens: int) -> Strip:
        """Returns the strip of the first `num_tokens` (at least 1) tokens only."""
        if self.across:
            return replace(self, count=min(self.count, num_tokens))
        return replace(self, nbytes=min(self.nbytes, num_tokens * self.token_nbytes))


def make_strips(
    pairs: Sequence[PlanePair],
    tokens: int,
    heads: int,
    *,
    tokens_first: bool,
    by_token: bool,
) -> list[Strip]:
    """Returns the strips of `pairs`, as few as possible.

    Args:
        pairs: the planes, in the order of a block in a contiguous buffer.
        tokens: the number of tokens of a block.
        heads: the number of heads of a token.
        tokens_first: whether heads follow each other within a token (NHD) or tokens within a head.
        by_token: whether prefixes of tokens are copied: then a run consists of whole tokens.
    """
    shape = _Shape(tokens, heads, tokens_first)
    cut = _cut_by_token if by_token else _cut
    strips = [strip for pair in pairs for strip in cut(pair, shape)]
    if not by_token:
        strips = [replace(strip, token_nbytes=strip.nbytes) for strip in _join(strips)]
    return _space(strips)


@dataclass(frozen=True, slots=True)
class _Shape:
    tokens: int
    heads: int
    tokens_first: bool


def _cut(pair: PlanePair, shape: _Shape) -> Iterator[Strip]:
    source, target = pair.source, pair.target
    row = source.row
    token, head = (source.token, target.token), (source.head, target.head)
    outer, inner = (token, head) if shape.tokens_first else (head, token)
    num_outer, num_inner = (
        (shape.tokens, shape.heads) if shape.tokens_first else (shape.heads, shape.tokens)
    )
    token_nbytes = row * shape.heads if shape.tokens_first else row
    if num_inner > 1 and inner != (row, row):
        if num_outer == 1 or outer == (num_inner * inner[0], num_inner * inner[1]):
            yield _strip(pair, (0, 0), inner, num_outer * num_inner, row, row)
            return
        for at in range(num_outer):
            shift = (at * outer[0], at * outer[1])
            yield _strip(pair, shift, inner, num_inner, row, row)
        return
    run = num_inner * row
    if num_outer == 1 or outer == (run, run):
        yield _strip(pair, (0, 0), (0, 0), 1, num_outer * run, token_nbytes)
    else:
        yield _strip(pair, (0, 0), outer, num_outer, run, token_nbytes)


def _cut_by_token(pair: PlanePair, shape: _Shape) -> Iterator[Strip]:
    source, target = pair.source, pair.target
    row, tokens, heads = source.row, shape.tokens, shape.heads
    token, head = (source.token, target.token), (source.head, target.head)
    if heads == 1 or (shape.tokens_first and head == (row, row)):
        width = heads * row  # a token in one piece
        if token == (width, width):
            yield _strip(pair, (0, 0), (0, 0), 1, tokens * width, width)
        else:
            yield _strip(pair, (0, 0), token, tokens, width, width, across=True)
    elif token == (row, row):
        yield _strip(pair, (0, 0), head, heads, tokens * row, row)
    else:
        for at in range(heads):
            shift = (at * head[0], at * head[1])
            yield _strip(pair, shift, token, tokens, row, row, across=True)


def _strip(
    pair: PlanePair,
    shift: tuple[int, int],
    spacing: tuple[int, int],
    count: int,
    nbytes: int,
    token_nbytes: int,
    *,
    across: bool = False,
) -> Strip:
    source, target = pair.source, pair.target
    return Strip(
        Side(source.offset + shift[0], spacing[0], source.block, source.memory),
        Side(target.offset + shift[1], spacing[1], target.block, target.memory),
        count,
        nbytes,
        token_nbytes,
        across,
    )


def _join(strips: Sequence[Strip]) -> list[Strip]:
    """Joins single runs that continue each other on both sides."""
    joined: list[Strip] = []
    for strip in strips:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.count == strip.count == 1
            and last.nbytes + strip.nbytes <= _MAX_RUN
            and _continues(last.source, strip.source, last.nbytes)
            and _continues(last.target, strip.target, last.nbytes)
        ):
            joined[-1] = replace(last, nbytes=last.nbytes + strip.nbytes)
        else:
            joined.append(strip)
    return joined


def _space(strips: Sequence[Strip]) -> list[Strip]:
    """Joins strips that continue each other, evenly spaced on both sides."""
    spaced: list[Strip] = []
    for strip in strips:
        last = spaced[-1] if spaced else None
        grown = None if last is None else _grown(last, strip)
        if grown is None:
            spaced.append(strip)
        else:
            spaced[-1] = grown
    return spaced


def _grown(last: Strip, strip: Strip) -> Strip | None:
    if (last.nbytes, last.token_nbytes) != (strip.nbytes, strip.token_nbytes):
        return None
    if last.across or strip.across:
        return None  # its runs count tokens from 0 on
    sides = []
    for before, after in ((last.source, strip.source), (last.target, strip.target)):
        spacing = after.offset - before.offset if last.count == 1 else before.spacing
        if strip.count > 1 and after.spacing != spacing:
            return None
        if not _continues(before, after, last.count * spacing):
            return None
        sides.append(replace(before, spacing=spacing))
    return replace(last, source=sides[0], target=sides[1], count=last.count + strip.count)


def _continues(before: Side, after: Side, distance: int) -> bool:
    return (
        before.memory == after.memory
        and before.step == after.step
        and after.offset - before.offset == distance
    )
