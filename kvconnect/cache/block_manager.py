"""Maps the tokens of sequences to blocks of KV memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconnect.cache.admission.admission import Admission
from kvconnect.cache.admission.planner import Planner
from kvconnect.cache.admission.prompt import Prompt, namespace_of
from kvconnect.cache.invariants import check_invariants
from kvconnect.cache.memory.copier import BlockCopier
from kvconnect.cache.memory.sizing import PoolSizes, pool_sizes
from kvconnect.cache.pool.block_pool import BlockPool
from kvconnect.cache.pool.events import EventLog, KvCacheEvent
from kvconnect.cache.pool.held_blocks import as_id_array
from kvconnect.cache.pool.matching import Matcher
from kvconnect.cache.pool.slabs import Slabs
from kvconnect.cache.sequence.pin_table import PinTable
from kvconnect.cache.sequence.sequence import Sequence as AdmittedSequence
from kvconnect.cache.tree.radix_tree import RadixTree, shared_tokens
from kvconnect.config import KvCacheConfig, KvCacheRetentionConfig
from kvconnect.errors import ConfigurationError, DuplicateRequest, SequencesLive
from kvconnect.keys import KeyChain
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import TokenArray, Tokens


@dataclass(frozen=True, slots=True)
class SequenceAllocation:
    """The result of admitting a sequence.

    Attributes:
        matched_tokens: the leading tokens whose KV is in the reused blocks.
        block_ids: int32, the blocks of group 0 in order of the tokens; owned by the caller.
        no_state_tokens: the tokens after the match whose keys and values are in the cache, and
            which are computed since no snapshot of recurrent states was at their end.
    """

    matched_tokens: int
    block_ids: npt.NDArray[np.int32]
    no_state_tokens: int = 0


class BlockManager(PinTable):
    """The block manager of all pools of one cache: pure bookkeeping, it holds no tensors.

    Synchronous and not thread-safe: callers serialise. Tokens are any integer sequence or NumPy
    array; an int32 array needs no conversion. After an error everything is unchanged. The methods
    of a sequence raise `UnknownRequest` if no live sequence has that id. For an argument `window`,
    ``None`` means group 0: full attention, else the largest window.

    Args:
        config: the rules of reuse; sizes the pools if `num_blocks` is not given.
        layout: the layout of the pool, or one for each pool group.
        num_blocks: the blocks of each pool, instead of sizes by `config`; a mapping by window
            (``None`` for full attention) if they differ. With one layout and a mapping, there is
            one pool for each window.
        num_host_blocks: the same for host memory.
        copier: carries out copies, in the order of its calls; ``None`` for no copies.
        clock: returns seconds; for retention durations only.
        sizes: the result of `pool_sizes` for the other arguments, if it was called before.

    Raises:
        ConfigurationError: no block fits, or a setting does not fit the pools.
    """

    def __init__(
        self,
        config: KvCacheConfig,
        layout: KvCacheLayout | Sequence[KvCacheLayout],
        *,
        num_blocks: int | Mapping[int | None, int] | None = None,
        num_host_blocks: int | Mapping[int | None, int] | None = None,
        copier: BlockCopier | None = None,
        clock: Callable[[], float] = time.monotonic,
        sizes: PoolSizes | None = None,
    ) -> None:
        sizes = sizes or pool_sizes(config, layout, num_blocks, num_host_blocks)
        tree = RadixTree(config.tokens_per_block, len(sizes.layouts))
        self._events = EventLog(config.event_buffer_max_size, sizes, tree)
        pools = tuple(
            BlockPool(
                group,
                tree,
                config=config,
                sizes=sizes,
                clock=clock,
                copier=copier,
                events=self._events,
            )
            for group in range(len(sizes.layouts))
        )
        slabs = Slabs(pools, tree, geometry=sizes.slabs, copier=copier)
        matcher = Matcher(tree, pools, config)
        super().__init__(tree, pools, slabs, matcher=matcher, layouts=sizes.layouts, config=config)
        self._planner = Planner(tree, pools, matcher, slabs=slabs, config=config)
        self._admission = Admission(
            tree, pools, self._planner, slabs=slabs, config=config, copier=copier
        )
        slabs.watch(self._live.values(), self._pins)

    # ---------------------------------------------------------------- queries

    def match(
        self,
        tokens: Tokens,
        *,
        cache_salt: str | None = None,
        lora_id: int | str | None = None,
        extra_key: str | int | None = None,
    ) -> int:
        """Returns how many leading tokens of `tokens` are published, at most all but the last.

        Changes nothing. The other arguments are as for `add_sequence`.

        Raises:
            ConfigurationError: (a ``ValueError``) there are no tokens, or one is outside int32.
        """
        prompt = Prompt.of(tokens, namespace_of(cache_salt, lora_id, extra_key))
        return self._planner.num_matched(prompt)

    def can_add(
        self,
        tokens: Tokens,
        *,
        cache_salt: str | None = None,
        lora_id: int | str | None = None,
        extra_key: str | int | None = None,
        max_matched: int | None = None,
        first_chunk: int | None = None,
        external_end: int | None = None,
    ) -> bool:
        """Returns whether `add_sequence` with these arguments would find enough blocks now.

        Changes nothing.

        Raises:
            ConfigurationError: (a ``ValueError``) as `add_sequence`.
        """
        prompt = Prompt.of(tokens, namespace_of(cache_salt, lora_id, extra_key)).within(
            max_matched=max_matched, first_chunk=first_chunk, external_end=external_end
        )
        return self._planner.plan(prompt) is not None

    def predict_match(self, prompt: Prompt, keys: KeyChain | None = None) -> int | None:
        """Returns the ``matched_tokens`` that `admit` would return now.

        Returns ``None`` if there are not enough blocks. Changes no block. The result is below that
        of `match` if a partial match does not fit. If there is a key index, `keys` gets the keys of
        the matched blocks from the index.
        """
        plan = self._planner.plan(prompt, keys)
        return None if plan is None else plan.num_matched

    def nearest(self, prompt: Prompt) -> tuple[int, TokenArray] | None:
        """Returns the first token of `prompt` that differs from published blocks, and theirs.

        At most a block of published tokens from that position on. Changes nothing. Returns ``None``
        if no published block continues the published prefix of `prompt` with other tokens.
        """
        root = self._tree.roots.get(prompt.namespace)
        if root is None:
            return None
        at, instead = self._tree.nearest(root, prompt.tokens)
        rest = bytes(prompt.tokens[at * self._tree.stride :])
        shared = shared_tokens(rest, instead)
        if not instead or 4 * shared >= min(len(rest), len(instead)):
            return None
        return at * self._tokens_per_block + shared, np.frombuffer(instead[4 * shared :], np.int32)

    def num_free_blocks(self, *, window: int | None = None) -> int:
        """Returns how many blocks the pool can allocate now without memory of other pools."""
        return self._pools[self._group(window)].num_free

    def num_allocated_blocks(self, *, window: int | None = None) -> int:
        """Returns how many blocks of the pool are held by sequences and pins."""
        pool = self._pools[self._group(window)]
        return pool.num_blocks - pool.num_free

    def num_reclaimed_blocks(self, *, window: int | None = None) -> int:
        """Returns how many published blocks of the pool were offloaded or dropped so far."""
        return self._pools[self._group(window)].num_reclaimed

    def num_no_state_tokens(self) -> int:
        """Returns how many tokens were not matched so far for want of a snapshot of their states.

        The keys and values of these tokens were in the cache.
        """
        return self._admission.no_state_tokens

    def max_blocks(self, *, window: int | None = None) -> int:
        """Returns the number of all blocks of the pool; changes when pools exchange memory."""
        return self._pools[self._group(window)].num_blocks

    def ensure_free(self, needs: Sequence[int]) -> bool:
        """Makes ``needs[group]`` blocks of each pool group free.

        Moves memory between pools for that. Returns False, and changes nothing, if that is not
        possible.
        """
        return self._slabs.ensure_free(needs)

    def block_ids(self, request_id: int, *, window: int | None = None) -> npt.NDArray[np.int32]:
        """Returns the sequence's blocks in order of its tokens: int32, owned by the caller.

        -1 stands for a block before the window, and for one that is not reserved yet.
        """
        return self.group_block_ids(request_id, self._group(window))

    # ---------------------------------------------------------------- the life of a sequence

    def add_sequence(
        self,
        request_id: int,
        tokens: Tokens,
        *,
        cache_salt: str | None = None,
        lora_id: int | str | None = None,
        extra_key: str | int | None = None,
        retention: KvCacheRetentionConfig | None = None,
        keys: KeyChain | None = None,
        max_matched: int | None = None,
        first_chunk: int | None = None,
        external_end: int | None = None,
        beside: bool = False,
    ) -> SequenceAllocation:
        """Adds a sequence with blocks for `tokens`, and reuses published blocks.

        May order copies and may reclaim published blocks.

        Args:
            request_id: the id of the sequence; no live sequence may have it.
            tokens: the prompt.
            cache_salt: only blocks with the same salt are reused.
            lora_id: only blocks with the same adapter are reused.
            extra_key: only blocks with the same other key are reused.
            retention: the priorities and durations of the sequence's blocks.
            keys: the chain of keys of the sequence's blocks, which grows with the tokens; for
                `block_keys` and `pin_keys`.
            max_matched: the most leading tokens that are reused.
            first_chunk: window pools allocate blocks for so many tokens to compute only; `reserve`
                is for the rest. A full-attention pool allocates for all tokens at once.
            external_end: an external store will fill the tokens before this position. Window pools
                never allocate blocks that lie before the window of this position.
            beside: the tokens before `external_end` may be computed meanwhile. Window pools then
                also keep the matched blocks from which computing continues. `reserve` allocates the
                others, up to the commit of `external_end` tokens.

        Raises:
            DuplicateRequest: a live sequence has this id.
            ConfigurationError: (a ``ValueError``) an argument is out of range.
            OutOfBlocks: there are not enough blocks.
        """
        prompt = Prompt.of(tokens, namespace_of(cache_salt, lora_id, extra_key)).within(
            max_matched=max_matched,
            first_chunk=first_chunk,
            external_end=external_end,
            beside=beside,
        )
        sequence = self.admit(request_id, prompt, retention=retention, keys=keys)
        ids = as_id_array(sequence.held[0].ids)
        return SequenceAllocation(sequence.matched, ids, sequence.no_state_tokens)

    def admit(
        self,
        request_id: int,
        prompt: Prompt,
        *,
        retention: KvCacheRetentionConfig | None = None,
        keys: KeyChain | None = None,
    ) -> AdmittedSequence:
        """Adds a sequence for `prompt`, as `add_sequence` does, and returns it, only to be read.

        The sequence owns the tokens then.

        Raises:
            DuplicateRequest, ConfigurationError, OutOfBlocks: as `add_sequence`.
        """
        if request_id in self._live:
            raise DuplicateRequest(f"request {request_id} has blocks already")
        if keys is not None and keys.tokens_per_block != self._tokens_per_block:
            raise ConfigurationError(
                f"keys: made for blocks of {keys.tokens_per_block} tokens, these have "
                f"{self._tokens_per_block}"
            )
        sequence = self._live[request_id] = self._admission.admit(prompt, retention, keys)
        return sequence

    # ---------------------------------------------------------------- the whole

    def reset(self) -> None:
        """Drops every published block.

        Raises:
            SequencesLive: a sequence or a pin is live.
        """
        sequences, pins = len(self._live), len(self._pins)
        if sequences or pins:
            raise SequencesLive(f"{sequences} sequences and {pins} pins hold blocks")
        self._events.removed_all()
        for pool in self._pools:
            pool.reset()
        self._tree.clear()

    def take_events(self) -> list[KvCacheEvent]:
        """Removes and returns the events since the last call, oldest first.

        Unlike all other methods, this one may be called from any thread.
        `KvCacheConfig.event_buffer_max_size` is the most events that are kept.
        """
        return self._events.take()

    def check_invariants(self) -> None:
        """Recounts the state of the block manager; for tests.

        Raises:
            AssertionError: an invariant is broken; the message names it.
        """
        check_invariants(self._tree, self._pools, self._live.values(), self._pins)

    # ---------------------------------------------------------------- inside

    def _group(self, window: int | None) -> int:
        if window is None:
            return 0
        for pool in self._pools:
            if pool.window == window:
                return pool.group
        windows = [pool.window for pool in self._pools]
        raise ConfigurationError(f"window: there is no pool of window {window}, only {windows}")
