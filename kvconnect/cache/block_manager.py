"""Which block of KV memory holds which tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Never

import numpy as np
import numpy.typing as npt

from kvconnect.cache.admission import Admission, AdmissionPlan
from kvconnect.cache.block_pool import BlockPool
from kvconnect.cache.copier import BlockCopier
from kvconnect.cache.invariants import check_invariants
from kvconnect.cache.pin_table import PinTable
from kvconnect.cache.publisher import Publisher
from kvconnect.cache.radix_tree import RadixTree
from kvconnect.cache.retention import RetentionPlan
from kvconnect.cache.sequence import PinHandle, as_id_array
from kvconnect.cache.sequence import Sequence as LiveSequence
from kvconnect.cache.settings import fixed_num_blocks, refuse_unsupported
from kvconnect.cache.sizing import num_primary_blocks
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
    """The block manager of one full-attention pool: pure bookkeeping, it holds no tensors.

    Synchronous and not thread-safe: callers serialise. Tokens are any integer sequence or NumPy
    array; an int32 array is taken without a conversion. Errors leave everything as it was. The
    methods of a sequence raise `UnknownRequest` if none has that id.

    Args:
        config: what to reuse; limits, where `num_blocks` is not given.
        layout: of the pool. Its window is for the attention to mask: blocks are kept for all
            tokens.
        num_blocks: blocks of the pool, instead of sizing by `config`; by window, ``{None: n}``.
        num_host_blocks: not supported yet: must be 0.
        copier: carries out copies, when they are ordered; ``None``: nobody does.
        clock: seconds; for retention durations only.

    Raises:
        ConfigurationError: no block fits, or a setting is not supported.
    """

    def __init__(
        self,
        config: KvCacheConfig,
        layout: KvCacheLayout,
        *,
        num_blocks: int | Mapping[int | None, int] | None = None,
        num_host_blocks: int | Mapping[int | None, int] | None = None,
        copier: BlockCopier | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        refuse_unsupported(config, layout, num_host_blocks)
        fixed = fixed_num_blocks(num_blocks)
        self._layout = layout
        self._copier = copier
        self._reuse = config.enable_block_reuse
        self._tree = RadixTree(layout.tokens_per_block)
        self._pool = BlockPool(fixed or num_primary_blocks(config, layout), self._tree, clock)
        self._admission = Admission(self._tree, self._pool, config)
        self._publisher = Publisher(
            self._tree, self._pool, layout.tokens_per_block, tails=config.enable_partial_reuse
        )
        self._sequences: dict[int, LiveSequence] = {}
        self._pins = PinTable(self._tree, self._pool, layout.tokens_per_block)

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
        query = _token_bytes(tokens)
        namespace = Namespace(cache_salt, lora_id, extra_key)
        match = self._admission.match(namespace, query, len(query) // 4 - 1)
        return self._admission.num_matched(match)

    def can_add(
        self,
        tokens: Tokens,
        *,
        cache_salt: str | None = None,
        lora_id: int | str | None = None,
        extra_key: str | int | None = None,
        max_matched: int | None = None,
        first_chunk: int | None = None,
    ) -> bool:
        """Whether `add_sequence` of the same arguments would find blocks now. Changes nothing.

        Raises:
            ConfigurationError: (a ``ValueError``) as `add_sequence`.
        """
        query = _token_bytes(tokens)
        namespace = Namespace(cache_salt, lora_id, extra_key)
        return self._plan(namespace, query, max_matched, first_chunk) is not None

    def foretell(
        self,
        tokens: Tokens,
        *,
        cache_salt: str | None = None,
        lora_id: int | str | None = None,
        extra_key: str | int | None = None,
    ) -> int | None:
        """``matched_tokens`` of `add_sequence` now; ``None``: no blocks. Changes nothing.

        Less than `match` where a partial match has to be given up for want of blocks.
        """
        query = _token_bytes(tokens)
        namespace = Namespace(cache_salt, lora_id, extra_key)
        plan = self._plan(namespace, query, None, None)
        return None if plan is None else self._admission.num_matched(plan.match)

    def num_free_blocks(self, *, window: int | None = None) -> int:
        """Blocks that could be allocated now."""
        _full_attention(window)
        return self._pool.num_free

    def num_allocated_blocks(self, *, window: int | None = None) -> int:
        """Blocks held by sequences and pins."""
        _full_attention(window)
        return self._pool.num_blocks - self._pool.num_free

    def max_blocks(self, *, window: int | None = None) -> int:
        """Blocks in all."""
        _full_attention(window)
        return self._pool.num_blocks

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
        """The sequence's blocks in order of its tokens: int32, the caller's own."""
        _full_attention(window)
        return as_id_array(self._sequence(request_id).ids)

    def num_blocks(self, request_id: int) -> int:
        """How many blocks the sequence holds."""
        return len(self._sequence(request_id).ids)

    def block_keys(self, request_id: int) -> Sequence[BlockKey]:
        """Chained keys of the sequence's full blocks, each hashed once by its `KeyChain`.

        Without a chain in `add_sequence` they are hashed now, and no store knows them.
        """
        sequence = self._sequence(request_id)
        chain = sequence.chain
        if chain is None:
            root = root_key(b"", (self._layout,), sequence.namespace)
            tokens = np.frombuffer(bytes(sequence.tokens), np.int32)
            chain = KeyChain(root, self._layout.tokens_per_block, TokenBuffer(tokens))
        return chain.keys(0, sequence.num_tokens // self._layout.tokens_per_block)

    def priorities(self, request_id: int, start: int = 0) -> list[int]:
        """Retention priority of each of the sequence's blocks from number `start` on."""
        sequence = self._sequence(request_id)
        found: list[int] = []
        if sequence.segment is not None:
            for step in sequence.segment.path():
                found.extend([self._pool.effective_priority(step)] * len(step.ids))
        for run in sequence.plan.runs(sequence.published, len(sequence.ids)):
            found.extend([run.retention.priority] * (run.stop - run.start))
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
    ) -> SequenceAllocation:
        """Give `tokens` their blocks, reusing what is published of them.

        May order one copy and may reclaim published blocks.

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
            first_chunk: for window pools; a full-attention pool allocates for all tokens at once.

        Raises:
            DuplicateRequest: there is such a sequence.
            ConfigurationError: (a ``ValueError``) an argument is out of range.
            OutOfBlocks: there are not enough blocks.
        """
        if request_id in self._sequences:
            raise DuplicateRequest(f"request {request_id} has blocks already")
        query = _token_bytes(tokens)
        namespace = Namespace(cache_salt, lora_id, extra_key)
        if keys is not None and keys.tokens_per_block != self._layout.tokens_per_block:
            raise ConfigurationError(
                f"keys: made for blocks of {keys.tokens_per_block} tokens, these have "
                f"{self._layout.tokens_per_block}"
            )
        plan = self._plan(namespace, query, max_matched, first_chunk)
        if plan is None:
            needed = -(-len(query) // (4 * self._layout.tokens_per_block))
            raise OutOfBlocks(
                f"{needed} blocks are needed, less what is shared; {self._pool.num_free} of "
                f"{self._pool.num_blocks} are free"
            )
        prompt = RetentionPlan(retention, len(query) // 4, self._layout.tokens_per_block)
        sequence = LiveSequence(namespace, query, prompt, keys)
        self._admission.admit(sequence, plan, self._copy_tokens)
        if keys is not None and namespace in self._tree.roots:
            self._tree.root(namespace, keys.root)
        self._sequences[request_id] = sequence
        return SequenceAllocation(sequence.matched, as_id_array(sequence.ids))

    def reserve(self, request_id: int, num_tokens: int) -> None:
        """Before a later chunk: a full-attention pool has blocks for the whole prompt already.

        Raises:
            ConfigurationError: (a ``ValueError``) `num_tokens` is beyond the sequence.
        """
        self._check_position("num_tokens", num_tokens, self._sequence(request_id))

    def append_tokens(self, request_id: int, tokens: Tokens) -> None:
        """The sequence goes on with `tokens`; takes a block where one begins.

        Raises:
            OutOfBlocks: there are not enough blocks; nothing was appended.
        """
        sequence = self._sequence(request_id)
        added = as_token_array(tokens)
        num_tokens = sequence.num_tokens + len(added)
        needed = -(-num_tokens // self._layout.tokens_per_block) - len(sequence.ids)
        if needed > 0:
            sequence.ids.extend(self._pool.allocate(needed))
        sequence.tokens += added.tobytes()

    def commit(self, request_id: int, num_computed_tokens: int) -> None:
        """The KV of the first `num_computed_tokens` is valid: publish the full blocks among them.

        Below an earlier commit it does nothing.

        Raises:
            ConfigurationError: (a ``ValueError``) beyond the sequence.
        """
        sequence = self._sequence(request_id)
        self._check_position("num_computed_tokens", num_computed_tokens, sequence)
        if num_computed_tokens <= sequence.computed:
            return
        sequence.computed = num_computed_tokens
        if self._reuse:
            stop = num_computed_tokens // self._layout.tokens_per_block
            self._publisher.commit(sequence, stop)

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
        blocks = -(-keep // self._layout.tokens_per_block)
        self._pool.drop(sequence.drop_after(blocks))
        del sequence.tokens[4 * keep :]

    def release(self, request_id: int) -> None:
        """The sequence ended, and the KV of all its tokens but the last is valid.

        Publishes that, full blocks and tail, and lets go of its blocks.
        """
        self._end(request_id, self._sequence(request_id).num_tokens - 1)

    def abort(self, request_id: int, num_valid_tokens: int) -> None:
        """The sequence ended: as `release`, but only the first `num_valid_tokens` are valid.

        What was committed stays published.

        Raises:
            ConfigurationError: (a ``ValueError``) beyond the sequence.
        """
        sequence = self._sequence(request_id)
        self._check_position("num_valid_tokens", num_valid_tokens, sequence)
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
        self._tree.clear()
        self._pool.reset()

    def take_events(self) -> list[Never]:
        """Events since the last call: none, as `event_buffer_max_size` must still be 0."""
        return []

    def check_invariants(self) -> None:
        """Recount everything.

        Raises:
            AssertionError: names the broken invariant.
        """
        check_invariants(
            self._tree,
            self._pool,
            self._sequences.values(),
            self._pins.live,
            self._layout.tokens_per_block,
        )

    # ---------------------------------------------------------------- inside

    def _sequence(self, request_id: int) -> LiveSequence:
        try:
            return self._sequences[request_id]
        except KeyError:
            raise UnknownRequest(f"no live request has the id {request_id}") from None

    def _plan(
        self,
        namespace: Namespace,
        query: bytearray,
        max_matched: int | None,
        first_chunk: int | None,
    ) -> AdmissionPlan | None:
        if max_matched is not None and max_matched < 0:
            raise ConfigurationError(f"max_matched: {max_matched} must be at least 0, or None")
        if first_chunk is not None and first_chunk < 1:
            raise ConfigurationError(f"first_chunk: {first_chunk} must be at least 1, or None")
        limit = len(query) // 4 - 1
        if max_matched is not None:
            limit = min(limit, max_matched)
        return self._admission.plan(namespace, query, limit)

    def _copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        if self._copier is not None:
            self._copier.copy_tokens(source, target, num_tokens)

    def _end(self, request_id: int, num_valid: int) -> None:
        sequence = self._sequences.pop(request_id)
        moment = self._pool.next_moment()
        private = sequence.ids
        if self._reuse:
            private = self._publisher.finish(sequence, num_valid, moment)
        self._pool.let_go(sequence.segment, moment)
        sequence.disband()
        self._pool.drop(private)

    @staticmethod
    def _check_position(field: str, num_tokens: int, sequence: LiveSequence) -> None:
        if not 0 <= num_tokens <= sequence.num_tokens:
            raise ConfigurationError(f"{field}: {num_tokens} is outside 0..{sequence.num_tokens}")


def _token_bytes(tokens: Tokens) -> bytearray:
    array = as_token_array(tokens)
    if len(array) == 0:
        raise ConfigurationError("tokens: at least one is needed")
    return bytearray(array)


def _full_attention(window: int | None) -> None:
    if window is not None:
        raise ConfigurationError(f"window: there is no pool of window {window}, only None")
