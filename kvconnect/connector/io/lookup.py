"""The lookup of a prompt in a store: whole blocks, and where possible part of the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvconnect.backend import MAX_CHILDREN, Backend, Child
from kvconnect.connector.io.window_search import WindowSearch, blocks_needed
from kvconnect.errors import RetryLater
from kvconnect.keys import BlockKey, KeyChain, Shard, chain_key, store_key, store_keys
from kvconnect.shards import StoredHeads
from kvconnect.tokens import TokenArray, as_token_array, common_length
from kvconnect.trace import warn_once

__all__ = ["Hit", "Lookup", "blocks_needed"]

_MOST_STEPS_BACK = 8
# The most changes, within one prompt, of the tensor parallelism with which its blocks were saved.
_MOST_CHANGES = 4

Shares = dict[tuple[int, int], int]
"""The shares of `Hit`, while they are searched."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The stored part of a prompt.

    Attributes:
        keys: chained keys of the leading whole blocks that are stored.
        tail: chained key of a stored block whose first tokens continue the prompt after `keys`, if
            any.
        end: the number of leading tokens that can be loaded; at most `Lookup.most`.
        num_stored: the leading blocks of each pool group that are stored and need no save.
        shares: the number of shares that the heads of a block are divided into, by pool group and
            block number, for blocks saved with another tensor parallelism. The others are as the
            ranks save them.
        divergence: the first token that differs from a stored block after `keys`, and the tokens of
            that block from there on; ``None``: none is known.
        reach: leading tokens whose keys and values it supplies; those beyond `end` lack recurrent
            states. 0 without states.
    """

    keys: tuple[BlockKey, ...] = ()
    tail: BlockKey | None = None
    end: int = 0
    num_stored: tuple[int, ...] = ()
    shares: Mapping[tuple[int, int], int] = field(default_factory=dict)
    divergence: tuple[int, tuple[int, ...]] | None = None
    reach: int = 0

    @property
    def all_keys(self) -> tuple[BlockKey, ...]:
        """The keys, with that of the tail."""
        return self.keys if self.tail is None else (*self.keys, self.tail)


class Lookup:
    """The lookups of prompts in one store; `find` runs on the store's loop.

    Args:
        backend: the store. If ranks share it, a block counts only if it is stored for all of them.
        heads: this rank's part of the model, for each pool group.
        whole_blocks: true if a hit must end with a block, because the engine cannot use part of
            one.
        state_interval: the tokens between two snapshots that engines take in any prompt; ``None``:
            not known.
        own_shares: true if only blocks in the ranks' own shares count.
    """

    def __init__(
        self,
        backend: Backend,
        heads: tuple[StoredHeads, ...],
        *,
        whole_blocks: bool = False,
        state_interval: int | None = None,
        own_shares: bool = False,
    ) -> None:
        self._backend = backend
        self._heads = heads
        self._state_interval = state_interval
        self._own_shares = own_shares
        self._windows = tuple(one.layout.window for one in heads)
        self._states = [group for group, one in enumerate(heads) if one.layout.kind == "state"]
        # Snapshots exist only at the ends of blocks.
        self._ends_with_a_block = whole_blocks or bool(self._states)

    def most(self, num_tokens: int) -> int:
        """Returns the most leading tokens that a hit of a prompt of `num_tokens` may have.

        The last token is computed in any case. If a hit must end with a block, the last block is
        loaded whole for its other tokens; with windows it is not, since the window before the last
        token may lack blocks.
        """
        most = num_tokens - 1
        if not self._ends_with_a_block:
            return most
        if all(window is None for window in self._windows):
            most += 1
        return most - most % self._heads[0].layout.tokens_per_block

    def store_key(self, key: BlockKey, group: int = 0, shares: int | None = None) -> BlockKey:
        """Returns the key of the block of `group` in the store, or of its first share."""
        return store_key(key, group, self._shards(group, shares)[0])

    def store_keys(
        self, keys: Sequence[BlockKey], group: int, shares: int | None = None
    ) -> list[BlockKey]:
        """Returns every key that must be in the store for the blocks of `group`, in order.

        Each block has as many keys as there are shards that make it up.
        """
        shards = self._shards(group, shares)
        if len(shards) == 1:
            return store_keys(keys, group, shards[0])
        return [store_key(key, group, shard) for key in keys for shard in shards]

    def _shards(self, group: int, shares: int | None) -> tuple[Shard, ...]:
        heads = self._heads[group]
        size = heads.size if shares is None else shares
        if self._backend.capabilities.shared:
            return heads.shards(size)
        return tuple(part.shard for part in heads.slices(size))

    async def find(self, chain: KeyChain, *, most_steps: int = _MOST_STEPS_BACK) -> Hit:
        """Returns the part of a prompt that the store has.

        Hashes keys of `chain`, which no other thread may use meanwhile.

        Every group with full attention must have every block. A group with a window must have the
        blocks that the window covers at the hit's end; its other blocks are not looked up. If a
        window's block is missing, the hit ends at that block and the window is looked up again, up
        to `most_steps` times. After that only the blocks from the first one on without a gap count.

        Raises the errors of the guarded backend.
        """
        keys = chain.keys()
        shares: Shares = {}
        counts = await self._leading_by_group(keys, shares)
        num_blocks = min((one for one in counts if one is not None), default=len(keys))
        hit = await self._with_tail(chain, keys[:num_blocks], shares)
        if any(window is not None for window in self._windows):
            search = WindowSearch(
                partial(self._leading, shares),
                self._has_states,
                hit.all_keys,
                layouts=[one.layout for one in self._heads],
                state_interval=self._state_interval,
            )
            end = await search.step_back(hit.end, most_steps)
            hit = replace(hit, end=end, reach=search.reach)
            if end <= num_blocks * chain.tokens_per_block:
                kept = hit.keys[: -(-end // chain.tokens_per_block)]
                hit = replace(hit, keys=kept, tail=None)
        num_stored = tuple(len(hit.keys) if one is None else one for one in counts)
        return replace(hit, num_stored=num_stored)

    async def _leading_by_group(self, keys: Sequence[BlockKey], shares: Shares) -> list[int | None]:
        """Returns how many leading blocks each group with full attention has; else ``None``."""
        counts: list[int | None] = []
        num_blocks = len(keys)
        for group, window in enumerate(self._windows):
            if window is not None:
                counts.append(None)
                continue
            num_blocks = await self._leading(shares, group, keys[:num_blocks], 0)
            counts.append(num_blocks)
        return counts

    async def _leading(
        self, shares: Shares, group: int, keys: Sequence[BlockKey], first: int
    ) -> int:
        """Returns how many leading `keys`, blocks of `group` from number `first` on, are stored.

        Other shares are looked up from the first block that is missing in the ranks' own shares,
        and again where they end. So a block that is missing in all shares costs one more lookup.
        Blocks in other shares are added to `shares`.
        """
        own, *_ = sizes = self._heads[group].sizes[: 1 if self._own_shares else None]
        at = await self._present(group, keys, own)
        size = own
        for _ in range(_MOST_CHANGES):
            others = [one for one in sizes if one != size]
            if at >= len(keys) or not others:
                break
            there = await asyncio.gather(
                *(self._present(group, keys[at : at + 1], one) for one in others)
            )
            if not any(there):
                break
            size = others[there.index(1)]
            stop = at + 1 + await self._present(group, keys[at + 1 :], size)
            if size != own:
                shares.update({(group, first + n): size for n in range(at, stop)})
            at = stop
        return at

    async def _has_states(self, key: BlockKey) -> bool:
        """Returns whether the block of `key` is there in all groups of states."""
        wanted = [one for group in self._states for one in self.store_keys([key], group)]
        return await self._backend.lookup(wanted) == len(wanted)

    async def _present(self, group: int, keys: Sequence[BlockKey], shares: int) -> int:
        if not keys:
            return 0
        found = await self._backend.lookup(self.store_keys(keys, group, shares))
        return found // len(self._shards(group, shares))

    async def _with_tail(self, chain: KeyChain, keys: Sequence[BlockKey], shares: Shares) -> Hit:
        """Returns the hit of `keys`, and of a block after them that continues the prompt.

        Searches blocks in the ranks' own shares, and in the shares of the last of `keys`.
        """
        tokens, first = chain.tokens, len(keys) * chain.tokens_per_block
        most = self.most(len(tokens))
        hit = Hit(tuple(keys), end=min(first, most), shares=shares)
        wanted = tokens[first:most][: chain.tokens_per_block]
        enumerable = self._backend.capabilities.enumerable
        if self._ends_with_a_block or len(wanted) == 0 or not enumerable:
            return hit
        parent, number = keys[-1] if keys else chain.root, len(keys)
        own = size = self._heads[0].sizes[0]
        for other in dict.fromkeys((own, shares.get((0, number - 1), own))):
            children = await self._children(parent, other)
            tail, num_tokens = self._best_child(parent, wanted, children, other)
            if first + num_tokens > hit.end:
                hit, size = replace(hit, tail=tail, end=first + num_tokens), other
            if (instead := _instead(children, wanted, num_tokens)) is not None:
                hit = replace(hit, divergence=(first + num_tokens, instead))
        if hit.tail is None:
            return hit
        if not await self._is_whole(hit.tail, number, size, shares):
            return replace(hit, tail=None, end=first)
        if size != own:
            shares[0, number] = size
        return hit

    async def _is_whole(self, tail: BlockKey, number: int, size: int, shares: Shares) -> bool:
        """Returns whether every group has the block `tail`, and group 0 all its `size` shares.

        The first share of group 0 is there.
        """
        rest = self.store_keys([tail], 0, size)[1:]
        if rest and await self._backend.lookup(rest) < len(rest):
            return False
        for group, window in enumerate(self._windows):
            if group and window is None and not await self._leading(shares, group, [tail], number):
                return False
        return True

    async def _children(self, parent: BlockKey, shares: int) -> Sequence[Child]:
        """Returns the last children of `parent` among those stored in so many `shares`."""
        try:
            children = await self._backend.children(self.store_key(parent, 0, shares))
        except RetryLater as error:
            # The index of children is optional: without it only the tail of a hit is lost.
            warn_once("connector.children", f"only whole blocks are looked up: {error}")
            return ()
        return children[-MAX_CHILDREN:]

    def _best_child(
        self, parent: BlockKey, wanted: TokenArray, children: Sequence[Child], shares: int
    ) -> tuple[BlockKey | None, int]:
        """Returns the child with most leading tokens of `wanted`, if its key is right."""
        common = [(common_length(one.tokens, wanted), at) for at, one in enumerate(children)]
        for num_tokens, number in sorted(common, reverse=True):
            if num_tokens == 0:
                break
            child = children[number]
            # The store's answer is not trusted: the key must equal the one computed from the
            # tokens.
            key = chain_key(parent, as_token_array(child.tokens))
            stored = self.store_key(key, 0, shares)
            size = self._heads[0].layout.tokens_per_block
            if len(child.tokens) <= size and stored == child.key:
                return key, num_tokens
        return None, 0


def _instead(
    children: Sequence[Child], wanted: TokenArray, num_tokens: int
) -> tuple[int, ...] | None:
    """Returns the tokens with which a child differs after `num_tokens` common ones of `wanted`.

    Those of the last such child; ``None``: there is none.
    """
    for child in reversed(children):
        shorter = min(len(child.tokens), len(wanted))
        if num_tokens < shorter and common_length(child.tokens, wanted) == num_tokens:
            return tuple(map(int, child.tokens[num_tokens:]))
    return None
