"""How far a store can supply a prompt: whole blocks, and where it can, part of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvconnect.backend import MAX_CHILDREN, Backend, Child
from kvconnect.errors import RetryLater
from kvconnect.keys import BlockKey, Shard, chain_key, store_key
from kvconnect.request import LlmRequest
from kvconnect.tokens import TokenArray, as_token_array
from kvconnect.trace import warn_once

__all__ = ["Hit", "Query", "blocks_needed", "look_up"]

_MOST_STEPS_BACK = 8


@dataclass(frozen=True, slots=True)
class Hit:
    """What a store has of a prompt.

    Attributes:
        keys: chained keys of the leading whole blocks that it supplies.
        tail: chained key of a block whose first tokens go on from there, if there is one.
        end: leading tokens that it supplies; at most all but the last.
        num_stored: leading blocks of each pool group that need no saving.
    """

    keys: tuple[BlockKey, ...] = ()
    tail: BlockKey | None = None
    end: int = 0
    num_stored: tuple[int, ...] = ()

    @property
    def all_keys(self) -> tuple[BlockKey, ...]:
        """The keys, with that of the tail."""
        return self.keys if self.tail is None else (*self.keys, self.tail)


@dataclass(frozen=True, slots=True)
class Query:
    """A request's tokens and keys, as they were when the question was asked.

    Attributes:
        keys: chained keys of its full blocks.
        root: the key before the first.
        tokens: all of them; nothing needs to supply the last one, as it is always computed.
        tokens_per_block: tokens of a full block.
        windows: attention window of each pool group, ``None`` for full attention.
        shard: this rank's part of the model.
    """

    keys: tuple[BlockKey, ...]
    root: BlockKey
    tokens: TokenArray
    tokens_per_block: int
    windows: tuple[int | None, ...] = (None,)
    shard: Shard = Shard()

    @classmethod
    def of(cls, request: LlmRequest, *, windows: tuple[int | None, ...], shard: Shard) -> Query:
        """A snapshot of `request`."""
        chain = request.key_chain
        return cls(
            tuple(request.block_keys()),
            chain.root,
            request.tokens.view.copy(),
            chain.tokens_per_block,
            windows,
            shard,
        )

    @property
    def most(self) -> int:
        """So many leading tokens can be of use."""
        return len(self.tokens) - 1

    def store_key(self, key: BlockKey, group: int = 0) -> BlockKey:
        """What the store knows the block of `group` with this `key` by."""
        return store_key(key, group, self.shard)


async def look_up(backend: Backend, query: Query, *, most_steps: int = _MOST_STEPS_BACK) -> Hit:
    """Ask `backend` how far it can supply `query`. Runs on the store's loop.

    Every group with full attention must have every block, and one with a window those that the
    window still covers at the hit's end; the others are not asked for. Where a window's block is
    missing the hit ends at that block and the window is asked for anew, `most_steps` times; then
    only what leads from the first block on without a gap counts.

    Raises whatever the guarded backend raises; nothing changed then.
    """
    counts = await _leading(backend, query)
    found = min((one for one in counts if one is not None), default=len(query.keys))
    keys = query.keys[:found]
    tail, tail_tokens = await _find_tail(backend, query, keys)
    size = query.tokens_per_block
    end = min(found * size + tail_tokens, query.most)
    if any(window is not None for window in query.windows):
        path = keys if tail is None else (*keys, tail)
        end = await _Windows(backend, query, path).step_back(end, most_steps)
        if end <= found * size:
            keys, tail = keys[: -(-end // size)], None
    return Hit(keys, tail, end, tuple(len(keys) if one is None else one for one in counts))


async def _leading(backend: Backend, query: Query) -> list[int | None]:
    """How many leading blocks each group with full attention has; ``None`` for the others."""
    counts: list[int | None] = []
    found = len(query.keys)
    for group, window in enumerate(query.windows):
        if window is not None:
            counts.append(None)
            continue
        if found:
            keys = [query.store_key(key, group) for key in query.keys[:found]]
            found = await backend.lookup(keys)
        counts.append(found)
    return counts


async def _find_tail(
    backend: Backend, query: Query, keys: Sequence[BlockKey]
) -> tuple[BlockKey | None, int]:
    """A block after `keys` whose first tokens go on with the prompt, and how many of them do."""
    wanted = query.tokens[len(keys) * query.tokens_per_block : query.most]
    if len(wanted) == 0 or not backend.capabilities.enumerable:
        return None, 0
    parent = keys[-1] if keys else query.root
    try:
        children = (await backend.children(query.store_key(parent)))[-MAX_CHILDREN:]
    except RetryLater as error:
        # An index beside the blocks: what it would add is short, and they count without it.
        warn_once("connector.children", f"only whole blocks are looked up: {error}")
        return None, 0
    tail, num_tokens = _best_child(query, parent, wanted[: query.tokens_per_block], children)
    for group, window in enumerate(query.windows):
        if tail is None or group == 0 or window is not None:
            continue
        if not await backend.lookup([query.store_key(tail, group)]):
            return None, 0
    return tail, num_tokens


def _best_child(
    query: Query, parent: BlockKey, wanted: TokenArray, children: Sequence[Child]
) -> tuple[BlockKey | None, int]:
    """The child that shares most tokens with `wanted`, if its key is what it must be."""
    shared = [(_num_shared(child.tokens, wanted), number) for number, child in enumerate(children)]
    for num_tokens, number in sorted(shared, reverse=True):
        if num_tokens == 0:
            break
        child = children[number]
        # A store may lie: only a key that follows from the tokens is believed.
        key = chain_key(parent, as_token_array(child.tokens))
        if len(child.tokens) <= query.tokens_per_block and query.store_key(key) == child.key:
            return key, num_tokens
    return None, 0


def _num_shared(tokens: TokenArray, wanted: TokenArray) -> int:
    length = min(len(tokens), len(wanted))
    differs = np.flatnonzero(tokens[:length] != wanted[:length])
    return int(differs[0]) if len(differs) else length


class _Windows:
    """Finds where the groups with a window have all that the window covers.

    Args:
        backend: the store.
        query: the question.
        path: keys of the blocks that a hit may use.
    """

    def __init__(self, backend: Backend, query: Query, path: Sequence[BlockKey]) -> None:
        self._backend = backend
        self._query = query
        self._path = path
        windows = enumerate(query.windows)
        self._windows = {group: window for group, window in windows if window is not None}
        # From this block on, up to where the hit ends, the group has everything.
        self._known = dict.fromkeys(self._windows, len(path))

    async def step_back(self, end: int, most_steps: int) -> int:
        """The largest end of a hit, at most `end`; smaller if that takes more than `most_steps`."""
        steps = 0
        settled: set[int] = set()
        while end and len(settled) < len(self._windows) and steps <= most_steps:
            for group in self._windows:
                if group in settled:
                    continue
                reached = await self._reach(group, end)
                if reached < end:
                    # What was enough for the others was for another end.
                    end, settled = reached, set()
                    steps += 1
                    break
                settled.add(group)
        if len(settled) < len(self._windows):
            end = await self._from_the_first(end)
        return end

    async def _reach(self, group: int, end: int) -> int:
        """`end` if the group has what it needs there; else where the first missing block begins."""
        size = self._query.tokens_per_block
        needed = blocks_needed(self._windows[group], end, size)
        unknown = range(needed.start, min(needed.stop, self._known[group]))
        if not unknown:
            return end
        present = await self._present(group, unknown)
        self._known[group] = unknown.start
        return end if present == len(unknown) else (unknown.start + present) * size

    async def _from_the_first(self, end: int) -> int:
        """Up to where every group has every block from the first one on."""
        size = self._query.tokens_per_block
        for group in self._windows:
            blocks = range(-(-end // size))
            present = await self._present(group, blocks)
            if present < len(blocks):
                end = present * size
        return end

    async def _present(self, group: int, blocks: range) -> int:
        if not blocks:
            return 0
        keys = [self._query.store_key(self._path[number], group) for number in blocks]
        return await self._backend.lookup(keys)


def blocks_needed(window: int | None, end: int, tokens_per_block: int) -> range:
    """Numbers of the blocks without which tokens from `end` on cannot be computed.

    With full attention (`window` is ``None``) every block of ``[0, end)``; else those that overlap
    ``[end - window + 1, end)``, and the one that `end` is inside of. After a commit of `end` tokens
    a running sequence holds no block before these.
    """
    first = 0 if window is None else max(0, end - window + 1) // tokens_per_block
    return range(first, -(-end // tokens_per_block))
