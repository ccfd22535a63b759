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
from kvconnect.cache.pool.block_pool import make_pools
from kvconnect.cache.pool.events import EventLog, KvCacheEvent
from kvconnect.cache.pool.held_blocks import as_id_array
from kvconnect.cache.pool.matching import Matcher
from kvconnect.cache.pool.slabs import Slabs
from kvconnect.cache.sequence.pin_table import PinTable
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.config import KvCacheConfig, KvCacheRetentionConfig
from kvconnect.errors import ConfigurationError, DuplicateRequest, SequencesLive
from kvconnect.keys import KeyChain
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import Tokens

__all__ = ["BlockManager", "SequenceAllocation"]


@dataclass(frozen=True, slots=True)
class SequenceAllocation:
    """The result of admitting a sequence.

    Attributes:
        matched_tokens: leading tokens whose KV its blocks hold already.
        block_ids: int32, in order of its tokens; owned by the caller.
    """

    matched_tokens: int
    block_ids: npt.NDArray[np.int32]


class BlockManager(PinTable):
    """The block manager of all pools of one cache: pure bookkeeping, it holds no tensors.

    Synchronous and not thread-safe: callers serialise. Tokens are any integer sequence or NumPy
    array; an int32 array is taken without a conversion. Errors leave everything as it was. The
    methods of a sequence raise `UnknownRequest` if none has that id. Where a `window` is asked for,
    ``None`` is group 0: full attention, else the largest window.

    Args:
        config: what to reuse; limits, where `num_blocks` is not given.
        layout: of the pool; of every pool group, if there are several.
        num_blocks: blocks of each pool, instead of sizing by `config`; by window (``None``: full
            attention) where they differ. With one layout there is one pool for each window named.
        num_host_blocks: the same in host memory, instead of sizing by `config`.
        copier: carries out copies, in the order in which they must happen; ``None``: no copies.
        clock: seconds; for retention durations only.
        sizes: what `pool_sizes` made of the other arguments, if that was called before.

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
        made = make_pools(config, sizes, tree, clock=clock, copier=copier, events=self._events)
        pools = tuple(made)
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
        """Returns how many leading tokens are published, at most all but the last.

        Changes nothing.

        Raises:
            ConfigurationError: (a ``ValueError``) no tokens, or a token outside int32.
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
        """Returns whether `add_sequence` would find blocks now for these arguments.

        Changes nothing.

        Raises:
            ConfigurationError: (a ``ValueError``) as `add_sequence`.
        """
        prompt = Prompt.of(tokens, namespace_of(cache_salt, lora_id, extra_key)).within(
            max_matched=max_matched, first_chunk=first_chunk, external_end=external_end
        )
        return self._planner.plan(prompt) is not None

    def predict_match(self, prompt: Prompt, keys: KeyChain | None = None) -> int | None:
        """Returns the ``matched_tokens`` of `admit` now, or ``None`` without blocks.

        Changes nothing. The result is below that of `match` if a partial match does not fit. Once a
        search by key was made, `keys` takes the keys of the matched blocks from the key index.
        """
        plan = self._planner.plan(prompt, keys)
        return None if plan is None else plan.num_matched

    def num_free_blocks(self, *, window: int | None = None) -> int:
        """Returns how many blocks could be allocated now without memory of other pools."""
        return self._pools[self._group(window)].num_free

    def num_allocated_blocks(self, *, window: int | None = None) -> int:
        """Returns how many blocks sequences and pins hold."""
        pool = self._pools[self._group(window)]
        return pool.num_blocks - pool.num_free

    def num_reclaimed_blocks(self, *, window: int | None = None) -> int:
        """Returns how many published blocks were reclaimed so far, offloaded or dropped."""
        return self._pools[self._group(window)].num_reclaimed

    def max_blocks(self, *, window: int | None = None) -> int:
        """Returns the number of all blocks. It changes when pools exchange memory."""
        return self._pools[self._group(window)].num_blocks

    def ensure_free(self, needs: Sequence[int]) -> bool:
        """Returns whether each pool group can supply so many blocks; moves memory for that.

        If it returns False, nothing changed.
        """
        return self._slabs.ensure_free(needs)

    def block_ids(self, request_id: int, *, window: int | None = None) -> npt.NDArray[np.int32]:
        """Returns the sequence's blocks in order of its tokens: int32, owned by the caller.

        -1 stands for a block that the window left behind, and for one that is not reserved yet.
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
    ) -> SequenceAllocation:
        """Allocates blocks for `tokens`, reusing those that are published.

        May order copies and may reclaim published blocks.

        Args:
            request_id: of no live sequence.
            tokens: the prompt.
            cache_salt: only blocks of the same salt,
            lora_id: adapter,
            extra_key: and other key are reused.
            retention: how long its blocks are worth keeping.
            keys: the keys of its blocks, followed as `tokens` grow; for `block_keys` and
                `pin_keys`.
            max_matched: reuse only so many leading tokens.
            first_chunk: window pools give blocks for so many tokens to be computed only; `reserve`
                is for the rest. A full-attention pool allocates for all tokens at once.
            external_end: an external store will fill the tokens before it. Window pools give no
                blocks, then or later, for what its window has left behind by then.

        Raises:
            DuplicateRequest: there is such a sequence.
            ConfigurationError: (a ``ValueError``) an argument is out of range.
            OutOfBlocks: there are not enough blocks.
        """
        prompt = Prompt.of(tokens, namespace_of(cache_salt, lora_id, extra_key)).within(
            max_matched=max_matched, first_chunk=first_chunk, external_end=external_end
        )
        return self.admit(request_id, prompt, retention=retention, keys=keys)

    def admit(
        self,
        request_id: int,
        prompt: Prompt,
        *,
        retention: KvCacheRetentionConfig | None = None,
        keys: KeyChain | None = None,
    ) -> SequenceAllocation:
        """Does what `add_sequence` does, for a prompt that was made before and not admitted yet."""
        if request_id in self._live:
            raise DuplicateRequest(f"request {request_id} has blocks already")
        if keys is not None and keys.tokens_per_block != self._tokens_per_block:
            raise ConfigurationError(
                f"keys: made for blocks of {keys.tokens_per_block} tokens, these have "
                f"{self._tokens_per_block}"
            )
        sequence = self._admission.admit(prompt, retention, keys)
        self._live[request_id] = sequence
        return SequenceAllocation(sequence.matched, as_id_array(sequence.held[0].ids))

    # ---------------------------------------------------------------- pins

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
        """Returns the events since the last call, oldest first.

        Unlike all other methods, it may be called from any thread.
        `KvCacheConfig.event_buffer_max_size` limits how many are kept.
        """
        return self._events.take()

    def check_invariants(self) -> None:
        """Recounts the state of the block manager.

        Raises:
            AssertionError: names the broken invariant.
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
