"""How far a store can supply a prompt: whole blocks, and where it can, part of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvconnect.backend import MAX_CHILDREN, Backend, Child
from kvconnect.keys import BlockKey, Shard, chain_key, store_key
from kvconnect.request import LlmRequest
from kvconnect.tokens import TokenArray, as_token_array

__all__ = ["Hit", "Query", "look_up"]


@dataclass(frozen=True, slots=True)
class Hit:
    """What a store has of a prompt.

    Attributes:
        keys: chained keys of the leading whole blocks that it has.
        tail: chained key of a block whose first `tail_tokens` go on from there, if there is one.
        tail_tokens: how many.
    """

    keys: tuple[BlockKey, ...] = ()
    tail: BlockKey | None = None
    tail_tokens: int = 0

    def num_tokens(self, tokens_per_block: int) -> int:
        """Leading tokens that it supplies."""
        return len(self.keys) * tokens_per_block + self.tail_tokens


@dataclass(frozen=True, slots=True)
class Query:
    """A request's tokens and keys, as they were when the question was asked."""

    keys: tuple[BlockKey, ...]
    root: BlockKey
    tokens: TokenArray
    tokens_per_block: int
    group: int = 0
    shard: Shard = Shard()

    @classmethod
    def of(cls, request: LlmRequest, *, group: int, shard: Shard) -> Query:
        """A snapshot of `request`."""
        chain = request.key_chain
        return cls(
            tuple(request.block_keys()),
            chain.root,
            request.tokens.view.copy(),
            chain.tokens_per_block,
            group,
            shard,
        )

    def store_key(self, key: BlockKey) -> BlockKey:
        """What the store knows `key` by."""
        return store_key(key, self.group, self.shard)


async def look_up(backend: Backend, query: Query) -> Hit:
    """Ask `backend` how far it can supply `query`. Runs on the store's loop.

    Raises whatever the guarded backend raises; nothing changed then.
    """
    found = 0
    if query.keys:
        found = await backend.lookup([query.store_key(key) for key in query.keys])
    hit = Hit(query.keys[:found])
    # The last token is always computed, so nothing needs to supply it.
    wanted = query.tokens[found * query.tokens_per_block : len(query.tokens) - 1]
    if len(wanted) == 0 or not backend.enumerable:
        return hit
    parent = query.keys[found - 1] if found else query.root
    children = (await backend.children(query.store_key(parent)))[-MAX_CHILDREN:]
    return _extended(hit, query, wanted[: query.tokens_per_block], children)


def _extended(hit: Hit, query: Query, wanted: TokenArray, children: Sequence[Child]) -> Hit:
    """`hit` and the child that shares most tokens with `wanted`, if its key is what it must be."""
    parent = hit.keys[-1] if hit.keys else query.root
    shared = [(_num_shared(child.tokens, wanted), number) for number, child in enumerate(children)]
    for num_tokens, number in sorted(shared, reverse=True):
        if num_tokens == 0:
            break
        child = children[number]
        # A store may lie: only a key that follows from the tokens is believed.
        key = chain_key(parent, as_token_array(child.tokens))
        if len(child.tokens) <= query.tokens_per_block and query.store_key(key) == child.key:
            return Hit(hit.keys, key, num_tokens)
    return hit


def _num_shared(tokens: TokenArray, wanted: TokenArray) -> int:
    length = min(len(tokens), len(wanted))
    differs = np.flatnonzero(tokens[:length] != wanted[:length])
    return int(differs[0]) if len(differs) else length
