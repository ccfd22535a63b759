"""A listing of a whole store: its prefix tree and its tenants, read once, asked often."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvconnect.backend import StoredEntry
from kvconnect.operations.choice import ReadTokens, token_reader
from kvconnect.operations.prefix_tree import PrefixTree, TreeRow
from kvconnect.operations.tenants import TenantUse, TenantUses
from kvconnect.operations.visit import each_block, listed, visiting
from kvconnect.tokens import TokenArray, as_token_array

MOST_BLOCKS = 4_000_000
"""The blocks that are listed at most, those of each tier; a listing says if there are more."""

_SHOWN_TOKENS = 64
"""The first tokens of a branch that are read."""
_SHOWN_BLOCKS = 16
"""The blocks that these are looked for in."""


@dataclass(frozen=True, slots=True, eq=False)
class ListedStore:
    """A store as it was when it was listed.

    Attributes:
        tree: of the blocks; one that several tiers have is counted in the first of them.
        tenants: the use of each, that with most bytes first. As by ``kvconnect stats``, a block
            counts in every tier.
        tenant_numbers: the place of each tenant in `tenants`, from 1 on, by its digest.
        listed_at: Unix seconds, of the end of the listing.
        took_s: the time that it took.
        complete: whether no block was left out for `MOST_BLOCKS`.
    """

    tree: PrefixTree
    tenants: list[TenantUse]
    tenant_numbers: Mapping[bytes | None, int]
    listed_at: float
    took_s: float
    complete: bool


async def list_store(
    url: str, names: Mapping[bytes, str], advance: Callable[[int], None]
) -> ListedStore:
    """Lists all blocks of the store of `url`.

    Takes some 400 bytes of memory per block meanwhile, and 40 to 150 afterwards.

    Args:
        url: of the store.
        names: of tenants, by the digest of their salt.
        advance: called with the number of blocks listed since the last call.

    Raises:
        ConfigurationError: no part of the store can list its blocks.
        BackendUnavailable: the store fails.
    """
    started_at = time.monotonic()
    tree, tenants, left = PrefixTree.Builder(), TenantUses(), MOST_BLOCKS
    complete = True
    async with visiting(url, "read") as store:
        for part in listed(url, store).values():
            async for entry in each_block(part):
                if not left:
                    complete = False
                    break
                left -= 1
                tree.add(entry)
                tenants.add(entry)
                if left % 1024 == 0:
                    advance(1024)
    uses = tenants.most_first(names)
    return ListedStore(
        tree.build(),
        uses,
        {use.digest: number for number, use in enumerate(uses, 1)},
        time.time(),
        time.monotonic() - started_at,
        complete=complete,
    )


async def tokens_of(url: str, tree: PrefixTree, rows: Sequence[TreeRow]) -> list[TokenArray]:
    """Returns the first tokens of the branch of each of `rows`, at most 64; may be none.

    Reads at most 16 blocks of each, those that are still stored.

    Raises:
        ConfigurationError: the key file of an encrypted store cannot be read.
        BackendUnavailable: the store fails.
    """
    read = token_reader(url)
    wanted = [tree.keys_of(row.node, _blocks_to_read(row)) for row in rows]
    every = [key for keys in wanted for key in keys]
    async with visiting(url, "read") as store:
        entries = iter(await store.describe(every) if every else ())
    return [_joined([next(entries) for _ in keys], read) for keys in wanted]


def _blocks_to_read(row: TreeRow) -> int:
    if not row.run_tokens:
        return 0
    return min(_SHOWN_BLOCKS, -(-_SHOWN_TOKENS * row.run_blocks // row.run_tokens))


def _joined(entries: Sequence[StoredEntry | None], read: ReadTokens) -> TokenArray:
    """Returns the tokens of the leading entries that are known."""
    found = []
    for entry in entries:
        tokens = None if entry is None else read(entry)
        if tokens is None:
            break
        found.append(tokens)
    return as_token_array(np.concatenate([np.empty(0, np.int32), *found])[:_SHOWN_TOKENS])
