"""Which block of KV memory holds which tokens."""

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
from kvconnect.cache.sequence.publisher import Publisher
from kvconnect.cache.sequence.sequence import PinHandle
from kvconnect.cache.sequence.sequence_table import SequenceTable
from kvconnect.cache.tree.radix_tree import RadixTree
from kvconnect.config import KvCacheConfig, KvCacheRetentionConfig
from kvconnect.errors import ConfigurationError, DuplicateRequest, SequencesLive
from kvconnect.keys import BlockKey, KeyChain
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import Tokens

__all__ = ["BlockManager", "SequenceAllocation"]


@dataclass(frozen=True, slots=True)
class SequenceAllocation:
    """What a new sequence got.

    Attributes:
        matched_tokens: leading tokens whose KV its blocks hold already.
        block_ids: int32, in order of its tokens; the caller's own.
    """

    matched_tokens: int
    block_ids: npt.NDArray[np.int32]


class BlockManager:
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
        self._layouts = sizes.layouts
        self._tokens_per_block = config.tokens_per_block
        self._tree = tree = RadixTree(config.tokens_per_block, len(sizes.layouts))
        self._events = EventLog(config.event_buffer_max_size, sizes, tree)
        made = make_pools(config, sizes, tree, clock=clock, copier=copier, events=self._events)
        self._pools = pools = tuple(made)
        self._slabs = slabs = Slabs(pools, tree, geometry=sizes.slabs, copier=copier)
        matcher = Matcher(tree, pools, config)
        self._planner = Planner(tree, pools, matcher, slabs=slabs, config=config)
        self._admission = Admission(
            tree, pools, self._planner, slabs=slabs, config=config, copier=copier
        )
        self._sequences = SequenceTable(tree, slabs, Publisher(tree, config))
        self._pins = PinTable(tree, pools, matcher)
        slabs.watch(self._sequences.live.values(), self._pins.live)

    # ---------------------------------------------------------------- queries

    def match(
        self,
        tokens: Tokens,
        *,
        cache_salt: str | None = None,
        lora_id: int | str | None = None,
        extra_key: str | int | None = None,
    ) -> int:
        """Leading tokens that are published, at most all but the last. Changes nothing.

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
        """Whether `add_sequence` of the same arguments would find blocks now. Changes nothing.

        Raises:
            ConfigurationError: (a ``ValueError``) as `add_sequence`.
        """
        prompt = Prompt.of(tokens, namespace_of(cache_salt, lora_id, extra_key)).within(
            max_matched=max_matched, first_chunk=first_chunk, external_end=external_end
        )
        return self._planner.plan(prompt) is not None

    def predict_match(self, prompt: Prompt, keys: KeyChain | None = None) -> int | None:
        """``matched_tokens`` of `admit` now; ``None``: no blocks. Changes nothing.

        Less than `match` where a partial match has to be given up for want of blocks. `keys` need
        not hash again what was hashed of the match, if a search by key was made before.
        """
        plan = self._planner.plan(prompt, keys)
        return None if plan is None else plan.num_matched

    def num_free_blocks(self, *, window: int | None = None) -> int:
        """Blocks that could be allocated now, without memory of other pools."""
        return self._pools[self._group(window)].num_free

    def num_allocated_blocks(self, *, window: int | None = None) -> int:
        """Blocks held by sequences and pins."""
        pool = self._pools[self._group(window)]
        return pool.num_blocks - pool.num_free

    def num_reclaimed_blocks(self, *, window: int | None = None) -> int:
        """Published blocks that had to make room so far, whether the host tier took them or not."""
        return self._pools[self._group(window)].num_reclaimed

    def max_blocks(self, *, window: int | None = None) -> int:
        """Blocks in all. It changes when pools give each other memory."""
        return self._pools[self._group(window)].num_blocks

    def ensure_free(self, needs: Sequence[int]) -> bool:
        """Whether each pool group can supply so many blocks; memory moves between them if need be.

        False changes nothing.
        """
        return self._slabs.ensure_free(needs)

    def num_tokens(self, request_id: int) -> int:
        """Tokens of the sequence, prompt and appended."""
        return self._sequences.get(request_id).num_tokens

    def tokens(self, request_id: int, start: int = 0) -> npt.NDArray[np.int32]:
        """A copy of the sequence's tokens from `start` on, int32."""
        return np.frombuffer(bytes(self._sequences.get(request_id).tokens[4 * start :]), np.int32)

    def holds(self, request_id: int) -> bool:
        """Whether there is a sequence of this id."""
        return request_id in self._sequences.live

    def block_ids(self, request_id: int, *, window: int | None = None) -> npt.NDArray[np.int32]:
        """The sequence's blocks in order of its tokens: int32, the caller's own.

        -1 stands for one that the window left behind, and for one that is not reserved yet.
        """
        return self.group_block_ids(request_id, self._group(window))

    def group_block_ids(self, request_id: int, group: int) -> npt.NDArray[np.int32]:
        """As `block_ids`, by the number of the pool group."""
        return as_id_array(self._sequences.get(request_id).held[group].ids)

    def num_blocks(self, request_id: int, group: int = 0) -> int:
        """How many blocks the sequence holds in a pool group."""
        held = self._sequences.get(request_id).held[group]
        return held.stop - held.first

    def num_reserved_tokens(self, request_id: int) -> int:
        """Leading tokens of the sequence that every pool group has blocks for."""
        return self._sequences.get(request_id).reserved

    def block_keys(self, request_id: int) -> Sequence[BlockKey]:
        """Chained keys of the sequence's full blocks, each hashed once by its `KeyChain`.

        Without a chain in `add_sequence` they are hashed now, and no store knows them.
        """
        return self._sequences.get(request_id).block_keys(self._tokens_per_block, self._layouts)

    def priorities(self, request_id: int, start: int = 0) -> list[int]:
        """Retention priority of each of the sequence's blocks from number `start` on, in group 0.

        Of a block that it does not hold: the priority that the request asked for.
        """
        return self._sequences.get(request_id).priorities(start)

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
        """Give `tokens` their blocks, reusing what is published of them.

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
        """As `add_sequence`, of a prompt that was made before and was not admitted yet."""
        if request_id in self._sequences.live:
            raise DuplicateRequest(f"request {request_id} has blocks already")
        if keys is not None and keys.tokens_per_block != self._tokens_per_block:
            raise ConfigurationError(
                f"keys: made for blocks of {keys.tokens_per_block} tokens, these have "
                f"{self._tokens_per_block}"
            )
        sequence = self._admission.admit(prompt, retention, keys)
        self._sequences.live[request_id] = sequence
        return SequenceAllocation(sequence.matched, as_id_array(sequence.held[0].ids))

    def reserve(self, request_id: int, num_tokens: int) -> None:
        """Before a later chunk: window pools get blocks up to position `num_tokens`.

        Raises:
            ConfigurationError: (a ``ValueError``) `num_tokens` is beyond the sequence.
            OutOfBlocks: there are not enough blocks; nothing changed.
        """
        self._sequences.reserve(request_id, num_tokens)

    def append_tokens(self, request_id: int, tokens: Tokens) -> None:
        """The sequence goes on with `tokens`; takes a block where one begins.

        Raises:
            ConfigurationError: (a ``ValueError``) its prompt is not wholly reserved.
            OutOfBlocks: there are not enough blocks; nothing was appended.
        """
        self._sequences.append_tokens(request_id, tokens)

    def commit(self, request_id: int, num_computed_tokens: int) -> None:
        """The KV of the first `num_computed_tokens` is valid: publish the full blocks among them.

        Window pools then give up the blocks that lie wholly before what the next token reads.
        Below an earlier commit it does nothing.

        Raises:
            ConfigurationError: (a ``ValueError``) beyond the sequence, or what is reserved of it.
        """
        self._sequences.commit(request_id, num_computed_tokens)

    def rewind(self, request_id: int, num_tokens: int) -> None:
        """Drop the last `num_tokens` tokens, and the blocks that held nothing else.

        Raises:
            ConfigurationError: (a ``ValueError``) negative, or below what was committed or matched.
        """
        self._sequences.rewind(request_id, num_tokens)

    def release(self, request_id: int) -> None:
        """The sequence ended, and the KV of all its tokens but the last is valid.

        Publishes that, full blocks and tail, and lets go of its blocks.

        Raises:
            ConfigurationError: (a ``ValueError``) its prompt is not wholly reserved.
        """
        self._sequences.release(request_id)

    def abort(self, request_id: int, num_valid_tokens: int) -> None:
        """The sequence ended: as `release`, but only the first `num_valid_tokens` are valid.

        What was committed stays published.

        Raises:
            ConfigurationError: (a ``ValueError``) beyond the sequence.
        """
        self._sequences.abort(request_id, num_valid_tokens)

    # ---------------------------------------------------------------- pins

    def pin(self, request_id: int) -> PinHandle:
        """Keep the blocks that the sequence holds now, also when it lets go of them."""
        return self._pins.pin(self._sequences.get(request_id))

    def pin_keys(self, keys: Sequence[BlockKey]) -> PinHandle:
        """Keep the longest leading run of blocks with these keys; perhaps none.

        Only prompts that came with a `KeyChain` can be found. The first call hashes what is
        published.
        """
        return self._pins.pin_keys(keys)

    def unpin(self, handle: PinHandle) -> None:
        """Let go of what `handle` holds; blocks without another holder can be reused.

        Raises:
            ConfigurationError: (a ``ValueError``) it was unpinned before.
        """
        self._pins.unpin(handle)

    def detach(self, request_id: int, first_block: int) -> PinHandle:
        """Take the blocks from `first_block` on away from the sequence, and give it fresh ones.

        The handle holds them, unpublished: something may still write to them. Of the sequence at
        most ``first_block * tokens_per_block`` tokens count as computed.

        Raises:
            ConfigurationError: (a ``ValueError``) no such block, or it is published.
            OutOfBlocks: there are not enough blocks.
        """
        return self._pins.detach(self._sequences.get(request_id), first_block)

    # ---------------------------------------------------------------- the whole

    def reset(self) -> None:
        """Drop every published block.

        Raises:
            SequencesLive: a sequence or a pin is live.
        """
        sequences, pins = len(self._sequences.live), len(self._pins.live)
        if sequences or pins:
            raise SequencesLive(f"{sequences} sequences and {pins} pins hold blocks")
        self._events.removed_all()
        for pool in self._pools:
            pool.reset()
        self._tree.clear()

    def take_events(self) -> list[KvCacheEvent]:
        """Events since the last call, oldest first; see `KvCacheConfig.event_buffer_max_size`."""
        return self._events.take()

    def check_invariants(self) -> None:
        """Recount everything.

        Raises:
            AssertionError: names the broken invariant.
        """
        check_invariants(self._tree, self._pools, self._sequences.live.values(), self._pins.live)

    # ---------------------------------------------------------------- inside

    def _group(self, window: int | None) -> int:
        if window is None:
            return 0
        for pool in self._pools:
            if pool.window == window:
                return pool.group
        windows = [pool.window for pool in self._pools]
        raise ConfigurationError(f"window: there is no pool of window {window}, only {windows}")
