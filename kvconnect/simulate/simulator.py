"""Drives the block manager with a stream of requests, in the time of the trace."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from operator import sub
from typing import NamedTuple

import torch

from kvconnect.cache.admission.prompt import Prompt
from kvconnect.cache.block_manager import BlockManager
from kvconnect.cache.memory.copier import BlockCopier
from kvconnect.config import KvCacheConfig
from kvconnect.layout import KvCacheLayout, StateTensor
from kvconnect.simulate.external_tier import ExternalTier
from kvconnect.simulate.first_token import ExternalHit
from kvconnect.simulate.machine import Machine
from kvconnect.simulate.retention_policy import RetentionPolicy
from kvconnect.simulate.tally import Counts, Tally
from kvconnect.simulate.trace_reader import TraceRequest
from kvconnect.tokens import TokenArray


class _Running(NamedTuple):
    request_id: int
    request: TraceRequest
    tokens: TokenArray
    matched: int
    prefilled: bool


class _Moves(NamedTuple):
    """The moves and evictions since the beginning; named as in `Counts`."""

    evicted_blocks: int = 0
    offloaded_blocks: int = 0
    onboarded_blocks: int = 0
    host_copied_tokens: int = 0
    device_copied_tokens: int = 0
    no_state_tokens: int = 0
    saved_blocks: int = 0
    external_evicted_blocks: int = 0


class Simulator:
    """Serves requests in the order in which they arrive; deterministic, on a clock of its own.

    A request is admitted as soon as the blocks for its prompt and its whole answer are available,
    and no request waits before it. It holds them until its last token. Prompt tokens that no tier
    supplies take ``1 / prefill_tokens_per_s`` each, generated ones ``1 / decode_tokens_per_s``;
    moving blocks takes no time. Its prompt is published once it is computed, its answer at the end.
    Full blocks are saved to the external tier at the same moments.

    Args:
        machine: its sizes and speeds.
        policy: the policy of retention; ``None``: requests ask for nothing.
        hits: the caller's list, to which each admitted prompt that the external tier has a part of
            is appended; ``None``: they are not kept.

    Attributes:
        tally: the counts so far.
        now: seconds after the first request.
    """

    def __init__(
        self,
        machine: Machine,
        policy: RetentionPolicy | None = None,
        hits: list[ExternalHit] | None = None,
    ) -> None:
        self.machine = machine
        self._hits = hits
        self.tally = Tally()
        self.now = 0.0
        size = machine.tokens_per_block
        self._copier = _CountingCopier()
        self._blocks = _simulated_blocks(machine, self._copier, lambda: self.now)
        # A slab of the states' pool never serves keys and values.
        self._most_blocks = machine.device_blocks - machine.state_blocks
        self._external: ExternalTier | None = None
        if machine.external_blocks:
            self._external = ExternalTier(machine.external_blocks, size)
        self._policy = policy or RetentionPolicy()
        self._moves = _Moves()
        self._events: list[tuple[float, int, _Running]] = []
        self._num_events = 0
        self._next_id = 0
        self._num_running = 0
        self._waiting: deque[TraceRequest] = deque()
        self._first_tokens: TokenArray | None = None  # the first waiting one, once made

    def arrive(self, request: TraceRequest) -> None:
        """Advances to the arrival of `request`, and admits it or queues it.

        Raises:
            ConfigurationError: the retention policy does not suit it.
        """
        self._run_until(request.arrival)
        self.now = request.arrival
        if -(-request.num_tokens // self.machine.tokens_per_block) > self._most_blocks:
            self.tally.at(self.now).too_long += 1
            return
        self._waiting.append(request)
        if len(self._waiting) == 1:  # else the first one has been refused since the last event
            self._admit_waiting()
        if len(self._waiting) > self.machine.max_waiting:
            self._waiting.pop()
            if not self._waiting:
                self._first_tokens = None
            self.tally.at(self.now).turned_away += 1
        counts = self.tally.at(self.now)
        counts.most_waiting = max(counts.most_waiting, len(self._waiting))

    def finish(self) -> None:
        """Serves the remaining requests; no more arrive."""
        self._run_until(float("inf"))

    # ---------------------------------------------------------------- time

    def _run_until(self, end: float) -> None:
        events = self._events
        while events and events[0][0] <= end:
            self.now, _, running = heapq.heappop(events)
            if running.prefilled:
                self._end(running)
            else:
                self._end_prefill(running)

    def _schedule(self, after: float, running: _Running) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now + after, self._num_events, running))

    # ---------------------------------------------------------------- the life of a request

    def _admit_waiting(self) -> None:
        limit = self.machine.max_batch_size
        while self._waiting and (limit is None or self._num_running < limit):
            request = self._waiting[0]
            tokens = self._first_tokens
            if tokens is None:
                tokens = self._first_tokens = request.tokens()
            if not self._fits(request, tokens):
                return
            self._waiting.popleft()
            self._first_tokens = None
            self._admit(request, tokens)

    def _fits(self, request: TraceRequest, tokens: TokenArray) -> bool:
        # Matched tokens need no more blocks than others, so this cheap check is sufficient.
        needed = -(-len(tokens) // self.machine.tokens_per_block)
        if self.machine.state_blocks:
            return self._blocks.ensure_free([needed, 1])
        if self._blocks.num_free_blocks() >= needed:
            return True
        return self._blocks.can_add(tokens, max_matched=request.input_length - 1)

    def _admit(self, request: TraceRequest, tokens: TokenArray) -> None:
        request_id = self._next_id
        self._next_id += 1
        prompt = tokens[: request.input_length]
        position, end = self._match_external(request, tokens, prompt)
        matched = self._blocks.add_sequence(
            request_id,
            prompt,
            retention=self._policy.config(request.system_length, request.line),
            max_matched=position,
        ).matched_tokens
        if request.output_length:
            self._blocks.append_tokens(request_id, tokens[request.input_length :])
        counts = self.tally.at(self.now)
        moved = self._count_moves(counts)
        size = self.machine.tokens_per_block
        from_host = moved.onboarded_blocks * size + moved.host_copied_tokens
        external = max(end - matched, 0)
        computed = request.input_length - matched - external
        counts.requests += 1
        counts.prompt_tokens += request.input_length
        counts.output_tokens += request.output_length
        counts.device_tokens += matched - from_host
        counts.host_tokens += from_host
        counts.external_tokens += external
        counts.computed_tokens += computed
        if external:
            counts.loaded_blocks += -(-end // size) - matched // size
            if self._hits is not None:
                self._hits.append(ExternalHit(external, computed))
        waited = self.now - request.arrival
        counts.waited_s += waited
        counts.longest_wait_s = max(counts.longest_wait_s, waited)
        counts.most_blocks = max(counts.most_blocks, self._blocks.num_allocated_blocks())
        self._num_running += 1
        running = _Running(request_id, request, tokens, matched, prefilled=False)
        self._schedule(computed / self.machine.prefill_tokens_per_s, running)

    def _match_external(
        self, request: TraceRequest, tokens: TokenArray, prompt: TokenArray
    ) -> tuple[int | None, int]:
        """Returns how much of the device's match to use (``None``: all), and the store's end.

        It follows the engine: the store is asked from a block boundary on, and it is used if its
        match is longer than the device's. The last prompt token is always computed.
        """
        if self._external is None:
            return None, 0
        end = self._external.match(tokens, request.input_length)
        end = min(end, request.input_length - 1)
        if end == 0:
            return None, 0
        on_device = self._blocks.predict_match(Prompt.of(prompt)) or 0
        if end <= on_device:
            return None, 0
        return on_device - on_device % self.machine.tokens_per_block, end

    def _end_prefill(self, running: _Running) -> None:
        request = running.request
        self._commit(running, 0, request.input_length)
        if self._external is not None:
            self._external.save(running.tokens, request.input_length)
        self._count_moves(self.tally.at(self.now))
        duration = request.output_length / self.machine.decode_tokens_per_s
        self._schedule(duration, running._replace(prefilled=True))

    def _end(self, running: _Running) -> None:
        request, size = running.request, self.machine.tokens_per_block
        # The last generated token was never fed back: it has no KV.
        valid = request.num_tokens - 1 if request.output_length else request.num_tokens
        if self.machine.state_blocks:
            self._commit(running, request.input_length, valid)
        self._blocks.abort(running.request_id, valid)
        if self._external is not None and valid // size > request.input_length // size:
            self._external.save(running.tokens, valid)
        self._count_moves(self.tally.at(self.now))
        self._num_running -= 1
        self._admit_waiting()

    def _commit(self, running: _Running, start: int, stop: int) -> None:
        start = max(start, running.matched)
        taken = _commit_with_snapshots(self._blocks, running.request_id, start, stop)
        self.tally.at(self.now).snapshots += taken

    # ---------------------------------------------------------------- counting

    def _count_moves(self, counts: Counts) -> _Moves:
        """Adds the moves since the last call to `counts`; returns them."""
        copier, external = self._copier, self._external
        now = _Moves(
            self._blocks.num_reclaimed_blocks(),
            copier.offloaded,
            copier.onboarded,
            copier.host_tokens,
            copier.device_tokens,
            self._blocks.num_no_state_tokens(),
            0 if external is None else external.num_saved,
            0 if external is None else external.num_dropped,
        )
        moved = _Moves(*map(sub, now, self._moves))
        self._moves = now
        for name, count in moved._asdict().items():
            setattr(counts, name, getattr(counts, name) + count)
        return moved


class _CountingCopier:
    """A `BlockCopier` that only counts, and only blocks of group 0: no states.

    Attributes:
        onboarded: blocks copied from host to device.
        offloaded: blocks copied from device to host.
        host_tokens: tokens copied out of a host block into a device block, for a partial match.
        device_tokens: tokens copied between device blocks, for a partial match.
    """

    def __init__(self) -> None:
        self.onboarded = 0
        self.offloaded = 0
        self.host_tokens = 0
        self.device_tokens = 0

    def onboard(self, group: int, host_ids: Sequence[int], ids: Sequence[int]) -> None:
        """Implements `BlockCopier`."""
        self.onboarded += 0 if group else len(ids)

    def offload(self, group: int, ids: Sequence[int], host_ids: Sequence[int]) -> None:
        """Implements `BlockCopier`."""
        self.offloaded += 0 if group else len(ids)

    def copy_tokens(
        self, group: int, source: int, target: int, num_tokens: int, *, from_host: bool = False
    ) -> None:
        """Implements `BlockCopier`."""
        if from_host:
            self.host_tokens += num_tokens
        else:
            self.device_tokens += num_tokens

    def move(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Implements `BlockCopier`; moves between slabs are not counted."""


def _simulated_blocks(
    machine: Machine, copier: BlockCopier, clock: Callable[[], float]
) -> BlockManager:
    """Returns the block manager of `machine`; with states, both pools share its memory."""
    size = machine.tokens_per_block
    attention = KvCacheLayout(1, 1, 1, 1, size, torch.int8)
    if not machine.state_blocks:
        config = KvCacheConfig(
            tokens_per_block=size, secondary_offload_min_priority=machine.offload_min_priority
        )
        return BlockManager(
            config,
            attention,
            num_blocks=machine.device_blocks,
            num_host_blocks=machine.host_blocks,
            copier=copier,
            clock=clock,
        )
    nbytes = attention.block_nbytes
    state = StateTensor(1, "state", (machine.state_blocks * nbytes,), torch.int8)
    config = KvCacheConfig(
        tokens_per_block=size,
        secondary_offload_min_priority=machine.offload_min_priority,
        state_interval=machine.state_interval,
        max_gpu_total_bytes=machine.device_blocks * nbytes,
        host_cache_size=machine.host_blocks * nbytes,
    )
    layouts = [attention, KvCacheLayout.of_states([state], size)]
    return BlockManager(config, layouts, copier=copier, clock=clock)


def _commit_with_snapshots(blocks: BlockManager, request_id: int, start: int, stop: int) -> int:
    """Commits the tokens ``start..stop`` of a sequence, with a snapshot at each end that is due.

    Returns the number of snapshots.
    """
    num_taken = 0
    while (end := blocks.next_state_end(request_id, start)) is not None and end <= stop:
        num_taken += blocks.state_snapshot(request_id, end) is not None
        blocks.commit(request_id, end)
        start = end
    blocks.commit(request_id, stop)
    return num_taken
