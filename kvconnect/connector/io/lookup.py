"""The lookup of a prompt in a store: whole blocks, and where possible part of the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvconnect.backend import MAX_CHILDREN, Backend, Child
from kvconnect.connector.io.window_search import WindowSearch, blocks_needed
from kvconnect.errors import RetryLater
from kvconnect.keys import BlockKey, KeyChain, Shard, chain_key, store_key, store_keys
from kvconnect.shards import StoredHeads
from kvconnect.tokens import TokenArray, as_token_array, common_length
from kvconnect.trace import warn_once

__all__ = ["Hit", "Query", "blocks_needed"]

_MOST_STEPS_BACK = 8
# The most changes, within one prompt, of the tensor parallelism with which its blocks were saved.
_MOST_CHANGES = 4


@dataclass(frozen=True, slots=True)
class Hit:
    """The stored part of a prompt.

    Attributes:
        keys: chained keys of the leading whole blocks that are stored.
        tail: chained key of a stored block whose first tokens continue the prompt after `keys`, if
            any.
        end: the number of leading tokens that can be loaded; at most `Query.most`.
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


@dataclass(slots=True, eq=False)
class Query:
    """The tokens and keys of a request at the start of its lookup, which `run` makes.

    Attributes:
        keys: chained keys of its full blocks.
        root: the key before the first.
        tokens: all tokens; the last one is always computed.
        tokens_per_block: tokens of a full block.
        heads: this rank's part of the model, for each pool group.
        shared: true if ranks share the store: a block counts only if it is stored for all of them.
        whole_blocks: true if a hit must end with a block, because the engine cannot use part of
            one.
        state_interval: the tokens between two snapshots that engines take in any prompt; ``None``:
            not known.
        own_shares: true if only blocks in the ranks' own shares count.
    """

    keys: tuple[BlockKey, ...]
    root: BlockKey
    tokens: TokenArray
    tokens_per_block: int
    heads: tuple[StoredHeads, ...]
    shared: bool = False
    whole_blocks: bool = False
    state_interval: int | None = None
    own_shares: bool = False
    _backend: Backend = field(init=False)
    _shares: dict[tuple[int, int], int] = field(init=False)
    _divergence: tuple[int, tuple[int, ...]] | None = field(init=False)

    @classmethod
    def of(
        cls,
        chain: KeyChain,
        *,
        heads: tuple[StoredHeads, ...],
        shared: bool,
        whole_blocks: bool = False,
        state_interval: int | None = None,
    ) -> Query:
        """Returns the query of `chain`; hashes missing keys, and does not copy the tokens."""
        return cls(
            tuple(chain.keys()),
            chain.root,
            chain.tokens,
            chain.tokens_per_block,
            heads,
            shared,
            whole_blocks,
            state_interval,
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The attention window of each pool group, ``None`` for full attention."""
        return tuple(one.layout.window for one in self.heads)

    @property
    def states(self) -> frozenset[int]:
        """The pool groups whose blocks are snapshots of recurrent states."""
        return frozenset(n for n, one in enumerate(self.heads) if one.layout.kind == "state")

    @property
    def ends_with_a_block(self) -> bool:
        """Returns whether a hit must end with a block; snapshots exist only there."""
        return self.whole_blocks or bool(self.states)

    @property
    def most(self) -> int:
        """The most leading tokens that a hit may have.

        The last token is computed in any case. If a hit must end with a block, the last block is
        loaded whole for its other tokens; with windows it is not, since the window before the last
        token may lack blocks.
        """
        most = len(self.tokens) - 1
        if not self.ends_with_a_block:
            return most
        if all(window is None for window in self.windows):
            most += 1
        return most - most % self.tokens_per_block

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
        heads = self.heads[group]
        size = heads.size if shares is None else shares
        if self.shared:
            return heads.shards(size)
        return tuple(part.shard for part in heads.slices(size))

    async def run(self, backend: Backend, *, most_steps: int = _MOST_STEPS_BACK) -> Hit:
        """Returns the part of the prompt that `backend` has; on the store's loop, one at a time.

        Every group with full attention must have every block. A group with a window must have the
        blocks that the window covers at the hit's end; its other blocks are not looked up. If a
        window's block is missing, the hit ends at that block and the window is looked up again, up
        to `most_steps` times. After that only the blocks from the first one on without a gap count.

        Raises the errors of the guarded backend.
        """
        self._backend, self._shares, self._divergence = backend, {}, None
        counts = await self._leading_by_group()
        num_blocks = min((one for one in counts if one is not None), default=len(self.keys))
        keys = self.keys[:num_blocks]
        tail, tail_tokens = await self._find_tail(keys)
        size = self.tokens_per_block
        end, reach = min(num_blocks * size + tail_tokens, self.most), 0
        if any(window is not None for window in self.windows):
            search = WindowSearch(
                self._leading,
                self._has_states,
                keys if tail is None else (*keys, tail),
                layouts=[one.layout for one in self.heads],
                state_interval=self.state_interval,
            )
            end = await search.step_back(end, most_steps)
            reach = search.reach
            if end <= num_blocks * size:
                keys, tail = keys[: -(-end // size)], None
        num_stored = tuple(len(keys) if one is None else one for one in counts)
        return Hit(keys, tail, end, num_stored, self._shares, self._divergence, reach)

    async def _leading_by_group(self) -> list[int | None]:
        """Returns how many leading blocks each group with full attention has; else ``None``."""
        counts: list[int | None] = []
        num_blocks = len(self.keys)
        for group, window in enumerate(self.windows):
            if window is not None:
                counts.append(None)
                continue
            num_blocks = await self._leading(group, self.keys[:num_blocks], 0)
            counts.append(num_blocks)
        return counts

    async def _leading(self, group: int, keys: Sequence[BlockKey], first: int) -> int:
        """Returns how many leading `keys`, blocks of `group` from number `first` on, are stored.

        Other shares are looked up from the first block that is missing in the ranks' own shares,
        and again where they end. So a block that is missing in all shares costs one more lookup.
        """
        own, *_ = sizes = self.heads[group].sizes[: 1 if self.own_shares else None]
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
                self._shares |= {(group, first + n): size for n in range(at, stop)}
            at = stop
        return at

    async def _has_states(self, key: BlockKey) -> bool:
        """Returns whether the block of `key` is there in all groups of states."""
        wanted = [one for group in sorted(self.states) for one in self.store_keys([key], group)]
        return await self._backend.lookup(wanted) == len(wanted)

    async def _present(self, group: int, keys: Sequence[BlockKey], shares: int) -> int:
        if not keys:
            return 0
        found = await self._backend.lookup(self.store_keys(keys, group, shares))
        return found // len(self._shards(group, shares))

    async def _find_tail(self, keys: Sequence[BlockKey]) -> tuple[BlockKey | None, int]:
        """Returns the key of a block after `keys` that continues the prompt, and its common tokens.

        Searches blocks in the ranks' own shares, and in the shares of the last of `keys`.
        """
        size = self.tokens_per_block
        wanted = self.tokens[len(keys) * size : self.most][:size]
        enumerable = self._backend.capabilities.enumerable
        if self.ends_with_a_block or len(wanted) == 0 or not enumerable:
            return None, 0
        own = self.heads[0].sizes[0]
        best: tuple[int, BlockKey | None, int] = (0, None, own)
        for shares in dict.fromkeys((own, self._shares.get((0, len(keys) - 1), own))):
            tail, num_tokens = await self._child(keys, wanted, shares)
            if num_tokens > best[0]:
                best = (num_tokens, tail, shares)
        num_tokens, tail, shares = best
        if tail is None:
            return None, 0
        rest = self.store_keys([tail], 0, shares)[1:]
        if rest and await self._backend.lookup(rest) < len(rest):
            return None, 0
        for group, window in enumerate(self.windows):
            if group and window is None and not await self._leading(group, [tail], len(keys)):
                return None, 0
        if shares != own:
            self._shares[0, len(keys)] = shares
        return tail, num_tokens

    async def _child(
        self, keys: Sequence[BlockKey], wanted: TokenArray, shares: int
    ) -> tuple[BlockKey | None, int]:
        """Returns the best child of the last of `keys` among those stored in so many `shares`."""
        parent = keys[-1] if keys else self.root
        try:
            children = await self._backend.children(self.store_key(parent, 0, shares))
        except RetryLater as error:
            # The index of children is optional: without it only the tail of a hit is lost.
            warn_once("connector.children", f"only whole blocks are looked up: {error}")
            return None, 0
        some = children[-MAX_CHILDREN:]
        tail, num_tokens = self._best_child(parent, wanted, some, shares)
        first = len(keys) * self.tokens_per_block
        for child in reversed(some):
            if num_tokens < min(len(child.tokens), len(wanted)) and (
                common_length(child.tokens, wanted) == num_tokens
            ):
                instead = tuple(map(int, child.tokens[num_tokens:]))
                self._divergence = (first + num_tokens, instead)
                break
        return tail, num_tokens

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
            if len(child.tokens) <= self.tokens_per_block and stored == child.key:
                return key, num_tokens
        return None, 0
