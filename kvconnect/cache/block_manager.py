"""Which block of KV memory holds which tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvconnect.cache.admission import Admission, AdmissionPlan, Request
from kvconnect.cache.block_pool import make_pools
from kvconnect.cache.copier import BlockCopier
from kvconnect.cache.events import EventLog, KvCacheEvent
from kvconnect.cache.invariants import check_invariants
from kvconnect.cache.matching import Matcher, first_in_window
from kvconnect.cache.pin_table import PinTable
from kvconnect.cache.publisher import Publisher
from kvconnect.cache.radix_tree import RadixTree
from kvconnect.cache.retention import RetentionPlan
from kvconnect.cache.sequence import Grip, PinHandle, as_id_array
from kvconnect.cache.sequence import Sequence as LiveSequence
from kvconnect.cache.sizing import PoolSizes, pool_sizes
from kvconnect.cache.slabs import Slabs
from kvconnect.config import KvCacheConfig, KvCacheRetentionConfig
from kvconnect.errors import (
    ConfigurationError,
    DuplicateRequest,
    OutOfBlocks,
    SequencesLive,
    UnknownRequest,
)
from kvconnect.keys import BlockKey, KeyChain, Namespace, root_key
from kvconnect.layout import KvCacheLayout
from kvconnect.tokens import TokenBuffer, Tokens, as_token_array

__all__ = ["BlockManager", "SequenceAllocation"]

_COMMON = Namespace()
"""Of requests without salt, adapter or other key."""


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
        copier: carries out copies, in the order in which they must happen; ``None``: nobody does.
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
        self._reuse = config.enable_block_reuse
        self._tree = RadixTree(config.tokens_per_block, len(sizes.layouts))
        self._events = EventLog(config.event_buffer_max_size, sizes, self._tree)
        self._pools = tuple(make_pools(config, sizes, self._tree, clock, copier, self._events))
        self._slabs = Slabs(self._pools, self._tree, sizes.slabs, copier)
        matcher = Matcher(self._tree, self._pools, config)
        self._admission = Admission(self._tree, self._pools, matcher, self._slabs, config, copier)
        self._publisher = Publisher(self._tree, config)
        self._sequences: dict[int, LiveSequence] = {}
        self._pins = PinTable(self._tree, self._pools, matcher)
        self._slabs.watch(self._sequences, self._pins)

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
        request = Request(_namespace(cache_salt, lora_id, extra_key), _token_bytes(tokens))
        return self._admission.num_matched(self._admission.match(request))

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
        namespace = _namespace(cache_salt, lora_id, extra_key)
        request = Request(namespace, _token_bytes(tokens), max_matched, first_chunk, external_end)
        return self._plan(request) is not None

    def foretell(
        self,
        tokens: Tokens,
        *,
        cache_salt: str | None = None,
        lora_id: int | str | None = None,
        extra_key: str | int | None = None,
        first_chunk: int | None = None,
        keys: KeyChain | None = None,
    ) -> int | None:
        """``matched_tokens`` of `add_sequence` now; ``None``: no blocks. Changes nothing.

        Less than `match` where a partial match has to be given up for want of blocks. `keys` need
        not hash again what was hashed of the match, if somebody asks for them before.
        """
        namespace = _namespace(cache_salt, lora_id, extra_key)
        plan = self._plan(Request(namespace, _token_bytes(tokens), first_chunk=first_chunk))
        if plan is None:
            return None
        if keys is not None:
            self._teach(keys, plan)
        return plan.num_matched

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

    def max_host_blocks(self, *, window: int | None = None) -> int:
        """Blocks in host memory."""
        host = self._pools[self._group(window)].host
        return 0 if host is None else host.num_blocks

    def ensure_free(self, needs: Sequence[int]) -> bool:
        """Whether each pool group can supply so many blocks; memory moves between them if need be.

        False changes nothing.
        """
        moves = self._slabs.plan(needs)
        if moves is None:
            return False
        self._slabs.carry_out(moves)
        return True

    def num_tokens(self, request_id: int) -> int:
        """Tokens of the sequence, prompt and appended."""
        return self._sequence(request_id).num_tokens

    def tokens(self, request_id: int, start: int = 0) -> npt.NDArray[np.int32]:
        """A copy of the sequence's tokens from `start` on, int32."""
        return np.frombuffer(bytes(self._sequence(request_id).tokens[4 * start :]), np.int32)

    def holds(self, request_id: int) -> bool:
        """Whether there is a sequence of this id."""
        return request_id in self._sequences

    def block_ids(self, request_id: int, *, window: int | None = None) -> npt.NDArray[np.int32]:
        """The sequence's blocks in order of its tokens: int32, the caller's own.

        -1 stands for one that the window left behind, and for one that is not reserved yet.
        """
        return self.group_block_ids(request_id, self._group(window))

    def group_block_ids(self, request_id: int, group: int) -> npt.NDArray[np.int32]:
        """As `block_ids`, by the number of the pool group."""
        return as_id_array(self._sequence(request_id).grips[group].ids)

    def num_blocks(self, request_id: int, group: int = 0) -> int:
        """How many blocks the sequence holds in a pool group."""
        grip = self._sequence(request_id).grips[group]
        return grip.stop - grip.first

    def num_reserved_tokens(self, request_id: int) -> int:
        """Leading tokens of the sequence that every pool group has blocks for."""
        return self._sequence(request_id).reserved

    def block_keys(self, request_id: int) -> Sequence[BlockKey]:
        """Chained keys of the sequence's full blocks, each hashed once by its `KeyChain`.

        Without a chain in `add_sequence` they are hashed now, and no store knows them.
        """
        sequence = self._sequence(request_id)
        chain = sequence.chain
        if chain is None:
            root = root_key(b"", self._layouts, sequence.namespace)
            tokens = np.frombuffer(bytes(sequence.tokens), np.int32)
            chain = KeyChain(root, self._tokens_per_block, TokenBuffer(tokens))
        return chain.keys(0, sequence.num_tokens // self._tokens_per_block)

    def priorities(self, request_id: int, start: int = 0) -> list[int]:
        """Retention priority of each of the sequence's blocks from number `start` on, in group 0.

        Of a block that it does not hold: the priority that the request asked for.
        """
        sequence = self._sequence(request_id)
        grip = sequence.grips[0]
        found: list[int] = []
        for run in sequence.plan.runs(0, len(grip.ids)):
            retention = grip.inherited if run.inherited else run.retention
            found.extend([retention.priority] * (run.stop - run.start))
        for step in grip.segments():
            found[step.start : step.end] = [grip.pool.published.effective_priority(step)] * len(
                step
            )
        return found[start:]

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
        if request_id in self._sequences:
            raise DuplicateRequest(f"request {request_id} has blocks already")
        if keys is not None and keys.tokens_per_block != self._tokens_per_block:
            raise ConfigurationError(
                f"keys: made for blocks of {keys.tokens_per_block} tokens, these have "
                f"{self._tokens_per_block}"
            )
        namespace = _namespace(cache_salt, lora_id, extra_key)
        query = _token_bytes(tokens)
        request = Request(namespace, query, max_matched, first_chunk, external_end)
        plan = self._plan(request)
        if plan is None:
            needed = -(-request.num_tokens // self._tokens_per_block)
            raise OutOfBlocks(f"{needed} blocks are needed, less what is shared; {self._state()}")
        prompt = RetentionPlan(retention, request.num_tokens, self._tokens_per_block)
        sequence = LiveSequence(namespace, query, prompt, keys, self._pools)
        if keys is not None:
            self._teach(keys, plan)
        self._admission.admit(sequence, plan)
        if keys is not None and namespace in self._tree.roots:
            self._tree.root(namespace, keys.root)
        self._sequences[request_id] = sequence
        return SequenceAllocation(sequence.matched, as_id_array(sequence.grips[0].ids))

    def reserve(self, request_id: int, num_tokens: int) -> None:
        """Before a later chunk: window pools get blocks up to position `num_tokens`.

        Raises:
            ConfigurationError: (a ``ValueError``) `num_tokens` is beyond the sequence.
            OutOfBlocks: there are not enough blocks; nothing changed.
        """
        sequence = self._sequence(request_id)
        self._check_position("num_tokens", num_tokens, sequence.num_tokens)
        if num_tokens <= sequence.reserved:
            return
        stop = -(-num_tokens // self._tokens_per_block)
        needs = [max(stop - grip.stop, 0) for grip in sequence.grips]
        self._supply(needs)
        for grip, need in zip(sequence.grips, needs, strict=True):
            grip.ids[grip.stop : grip.stop + need] = grip.pool.allocate(need)
            grip.stop += need
        sequence.reserved = num_tokens

    def append_tokens(self, request_id: int, tokens: Tokens) -> None:
        """The sequence goes on with `tokens`; takes a block where one begins.

        Raises:
            ConfigurationError: (a ``ValueError``) its prompt is not wholly reserved.
            OutOfBlocks: there are not enough blocks; nothing was appended.
        """
        sequence = self._sequence(request_id)
        added = as_token_array(tokens)
        if len(added) == 0:
            return
        self._check_reserved(sequence, sequence.num_tokens)
        num_tokens = sequence.num_tokens + len(added)
        needed = -(-num_tokens // self._tokens_per_block) - sequence.num_blocks
        if needed > 0:
            self._supply([needed] * len(self._pools))
            for grip in sequence.grips:
                grip.ids.extend(grip.pool.allocate(needed))
                grip.stop += needed
        sequence.tokens += added.tobytes()
        sequence.reserved = num_tokens

    def commit(self, request_id: int, num_computed_tokens: int) -> None:
        """The KV of the first `num_computed_tokens` is valid: publish the full blocks among them.

        Window pools then give up the blocks that lie wholly before what the next token reads.
        Below an earlier commit it does nothing.

        Raises:
            ConfigurationError: (a ``ValueError``) beyond the sequence, or what is reserved of it.
        """
        sequence = self._sequence(request_id)
        self._check_position("num_computed_tokens", num_computed_tokens, sequence.num_tokens)
        if num_computed_tokens <= sequence.computed:
            return
        self._check_reserved(sequence, num_computed_tokens)
        sequence.computed = num_computed_tokens
        self._publisher.commit(sequence, num_computed_tokens // self._tokens_per_block)
        for grip in sequence.grips:
            if grip.pool.window is not None:
                first = first_in_window(grip.pool.window, num_computed_tokens)
                self._give_up(sequence, grip, first // self._tokens_per_block)

    def rewind(self, request_id: int, num_tokens: int) -> None:
        """Drop the last `num_tokens` tokens, and the blocks that held nothing else.

        Raises:
            ConfigurationError: (a ``ValueError``) negative, or below what was committed or matched.
        """
        sequence = self._sequence(request_id)
        keep = sequence.num_tokens - num_tokens
        if num_tokens < 0 or keep < max(sequence.computed, sequence.matched):
            raise ConfigurationError(
                f"num_tokens: {num_tokens} of {sequence.num_tokens} cannot be dropped; the first "
                f"{max(sequence.computed, sequence.matched)} are matched or committed"
            )
        blocks = -(-keep // self._tokens_per_block)
        for grip in sequence.grips:
            grip.pool.private.drop(sequence.forget(grip, blocks, sequence.num_blocks))
            grip.stop = min(grip.stop, blocks)
        for pin in sequence.pins:
            for held in pin.grips:
                held.end = min(held.end, blocks)
        for grip in sequence.grips:
            del grip.ids[blocks:]
        del sequence.tokens[4 * keep :]
        sequence.reserved = min(sequence.reserved, keep)

    def release(self, request_id: int) -> None:
        """The sequence ended, and the KV of all its tokens but the last is valid.

        Publishes that, full blocks and tail, and lets go of its blocks.

        Raises:
            ConfigurationError: (a ``ValueError``) its prompt is not wholly reserved.
        """
        sequence = self._sequence(request_id)
        self._check_reserved(sequence, sequence.num_tokens)
        self._end(request_id, sequence.num_tokens - 1)

    def abort(self, request_id: int, num_valid_tokens: int) -> None:
        """The sequence ended: as `release`, but only the first `num_valid_tokens` are valid.

        What was committed stays published.

        Raises:
            ConfigurationError: (a ``ValueError``) beyond the sequence.
        """
        sequence = self._sequence(request_id)
        self._check_position("num_valid_tokens", num_valid_tokens, sequence.num_tokens)
        self._end(request_id, num_valid_tokens)

    # ---------------------------------------------------------------- pins

    def pin(self, request_id: int) -> PinHandle:
        """Keep the blocks that the sequence holds now, also when it lets go of them."""
        return self._pins.pin(self._sequence(request_id))

    def pin_keys(self, keys: Sequence[BlockKey]) -> PinHandle:
        """Keep the longest leading run of blocks with these keys; perhaps none.

        Only prompts that came with a `KeyChain` can be found. The first call hashes what is
        published.
        """
        return self._pins.pin_keys(keys)

    def unpin(self, handle: PinHandle) -> None:
        """Let go of what `handle` holds; blocks that nobody else holds can be reused.

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
        return self._pins.detach(self._sequence(request_id), first_block)

    # ---------------------------------------------------------------- the whole

    def reset(self) -> None:
        """Drop every published block.

        Raises:
            SequencesLive: a sequence or a pin is live.
        """
        if self._sequences or self._pins:
            raise SequencesLive(
                f"{len(self._sequences)} sequences and {len(self._pins)} pins hold blocks"
            )
        self._events.removed_all([pool.published for pool in self._pools])
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
        check_invariants(self._tree, self._pools, self._sequences.values(), self._pins.live)

    # ---------------------------------------------------------------- inside

    def _sequence(self, request_id: int) -> LiveSequence:
        try:
            return self._sequences[request_id]
        except KeyError:
            raise UnknownRequest(f"no live request has the id {request_id}") from None

    def _group(self, window: int | None) -> int:
        if window is None:
            return 0
        for pool in self._pools:
            if pool.window == window:
                return pool.group
        windows = [pool.window for pool in self._pools]
        raise ConfigurationError(f"window: there is no pool of window {window}, only {windows}")

    def _plan(self, request: Request) -> AdmissionPlan | None:
        if request.max_matched is not None:
            _check_least("max_matched", request.max_matched, 0)
        if request.first_chunk is not None:
            _check_least("first_chunk", request.first_chunk, 1)
        if request.external_end is not None:
            self._check_position("external_end", request.external_end, request.num_tokens)
        return self._admission.plan(request)

    def _teach(self, keys: KeyChain, plan: AdmissionPlan) -> None:
        # Only where keys are asked for: otherwise the tree has none.
        segment, index = plan.match.segment, self._tree.index
        if segment is not None and index is not None:
            index.teach(keys, segment, plan.match.num_blocks)

    def _supply(self, needs: Sequence[int]) -> None:
        # All pools or none: after this, allocating so many cannot fail.
        if not self.ensure_free(needs):
            raise OutOfBlocks(f"{'/'.join(map(str, needs))} blocks are needed; {self._state()}")

    def _state(self) -> str:
        return ", ".join(
            f"{pool.num_free} of {pool.num_blocks} are free"
            + ("" if pool.window is None else f" in the pool of window {pool.window}")
            for pool in self._pools
        )

    def _give_up(self, sequence: LiveSequence, grip: Grip, stop: int) -> None:
        if stop <= grip.first:
            return
        private = sequence.forget(grip, grip.first, stop)
        outside = grip.split_off(stop, self._tree.split)
        grip.first = stop
        outside.let_go()
        grip.pool.private.drop(private)

    def _end(self, request_id: int, num_valid: int) -> None:
        sequence = self._sequences.pop(request_id)
        self._publisher.finish(sequence, num_valid)
        for grip in sequence.grips:
            private = sequence.forget(grip, grip.first, grip.stop)
            grip.let_go()
            grip.pool.private.drop(private)
        sequence.disband()

    @staticmethod
    def _check_reserved(sequence: LiveSequence, num_tokens: int) -> None:
        if num_tokens > sequence.reserved:
            raise ConfigurationError(
                f"request: blocks are reserved for {sequence.reserved} of its tokens, and this "
                f"needs {num_tokens}; call reserve first"
            )

    @staticmethod
    def _check_position(field: str, position: int, num_tokens: int) -> None:
        if not 0 <= position <= num_tokens:
            raise ConfigurationError(f"{field}: {position} is outside 0..{num_tokens}")


def _namespace(
    cache_salt: str | None, lora_id: int | str | None, extra_key: str | int | None
) -> Namespace:
    if cache_salt is None and lora_id is None and extra_key is None:
        return _COMMON  # mostly; a dictionary finds it without comparing
    return Namespace(cache_salt, lora_id, extra_key)


def _check_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigurationError(f"{field}: {value} must be at least {least}, or None")


def _token_bytes(tokens: Tokens) -> bytearray:
    array = as_token_array(tokens)
    if len(array) == 0:
        raise ConfigurationError("tokens: at least one is needed")
    return bytearray(array)
