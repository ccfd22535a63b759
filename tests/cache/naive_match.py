"""A naive model of matching, and of what a prompt takes (specification: block manager, 3 and 4)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from naive_blocks import Block


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


class NaiveAdmission:
    """Part of `NaiveManager`."""

    def find(self, space, tokens, max_matched, *, partial=True):
        limit = len(tokens) - 1 if max_matched is None else min(len(tokens) - 1, max_matched)
        if not self.config.enable_block_reuse:
            limit = 0
        where = (self.pools, self.root(space), tokens, limit, self.size)
        if partial and self.config.enable_partial_reuse:
            return longest(*where, copy=self.config.copy_on_partial_reuse)
        return longest_whole(*where)

    def plan(self, space, tokens, max_matched, first_chunk, external_end):
        match = self.find(space, tokens, max_matched)
        for tried in [match, self.find(space, tokens, max_matched, partial=False)]:
            begin = max(tried.length, external_end or 0)
            self.check_begin(begin)
            end = len(tokens) if first_chunk is None else min(len(tokens), begin + first_chunk)
            places = {
                pool: self.places(pool, tried, len(tokens), begin, end) for pool in self.pools
            }
            if all(place.need <= pool.free(place.claimed) for pool, place in places.items()):
                return SimpleNamespace(match=tried, end=end, places=places)
        return None

    def places(self, pool, match, num_tokens, begin, end):
        """What `pool` would give: matched blocks, "fresh" or None, and what that takes."""
        total = -(-num_tokens // self.size)
        first = first_block(pool, begin, self.size)
        last = total if pool.window is None else -(-end // self.size)
        if pool.is_state:
            last = begin // self.size
        found = [None] * total
        for number in range(first, last):
            whole = number < len(match.path)
            found[number] = match.path[number].blocks[pool] if whole else "fresh"
        claimed = [block for block in found if block not in (None, "fresh")]
        need = found.count("fresh") + sum(block.primary is None for block in claimed)
        if match.source:
            source = match.source.blocks[pool]
            claimed.append(source)
            if found[len(match.path)] and not self.config.copy_on_partial_reuse:
                need -= source.primary is not None
        return SimpleNamespace(blocks=found, claimed=claimed, need=need)

    def fill(self, seq, pool, match, places):
        seq.duplicates[pool], seq.inherited[pool] = set(), {}
        blocks = list(places.blocks)
        need = places.need
        for block in blocks[: len(match.path)]:
            if block and block.primary is None:
                [block.primary] = pool.take(1, places.claimed)
                self.copier.onboard(pool.group, [block.host], [block.primary])
                need -= 1
        place = len(match.path)
        source = match.source.blocks[pool] if match.source else None
        if source and blocks[place]:
            kept = (35, None) if pool.ran_out(source) else (source.priority, source.duration)
            seq.inherited[pool][place] = kept
        if source and blocks[place] and self.returns_first(source):
            blocks[place] = self.begin_from(source, pool, match, pool.take(1, places.claimed))
            pool.drop(source)
            source, need = None, need - 1
        slots = pool.take(need, places.claimed)
        if source:
            if blocks[place]:
                blocks[place] = self.begin_from(source, pool, match, slots)
            source.used = pool.tick()
        for number, block in enumerate(blocks):
            if number < len(match.path) and block:
                asked = seq.asked(pool, number, self.size)
                if asked:
                    block.retain(asked)
            elif block == "fresh":
                blocks[number] = Block(slots.pop())
        seq.blocks[pool] = blocks
        for block in blocks:
            if block:
                block.holders.append(seq)

    def returns_first(self, source):
        """It is taken over from the host: before anything is taken for the blocks after it."""
        return not self.config.copy_on_partial_reuse and source.primary is None

    def begin_from(self, source, pool, match, slots):
        """The sequence's own block that starts with what it shares with `source`."""
        in_primary = source.primary is not None
        if not self.config.copy_on_partial_reuse:
            if in_primary:
                slot, source.primary = source.primary, None
            else:
                slot = slots.pop()
                self.copier.onboard(pool.group, [source.host], [slot])
            return Block(slot)
        slot, place = slots.pop(), source.primary if in_primary else source.host
        shared = match.length % self.size
        self.copier.copy_tokens(pool.group, place, slot, shared, from_host=not in_primary)
        return Block(slot)
