"""Decides how many tokens of a request are computed beside its load."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from weakref import WeakSet

import torch

from kvconnect.engine.loaded_tokens import join_head
from kvconnect.engine.model.sequence_step import SequenceStep
from kvconnect.overlap import (
    Chunk,
    LoadingPrompt,
    next_chunk,
    next_chunk_behind,
    should_start,
)
from kvconnect.pace import LoadPace, RunningLoad, StepPace
from kvconnect.request import ExternalMatch, LlmRequest, ScheduledBatch
from kvconnect.trace import count

_WORTH = 0.25
"""The share of a load's time that computing beside it must save: both use memory and processors."""


@dataclass(slots=True, eq=False)
class _Running:
    """A running load, beside which its request computes.

    Attributes:
        load: its progress, in tokens.
        started: the monotonic time of its start.
        start: the computed tokens at that time.
        predicted_s: the first prediction of when load and computing meet, in seconds since its
            start.
        alone: true if computing beside it would hardly save time.
        explores: true if it is predicted to bring nothing, and started to measure the store.
        head: the end of the first tokens that it has brought.
    """

    load: RunningLoad
    started: float
    start: int
    predicted_s: float | None = None
    alone: bool = False
    explores: bool = False
    head: int = 0


class BesideLoads:
    """The measured pace of the engine's steps and loads, and the chunks derived from it.

    Belongs to the engine's thread. Covers only loads that overlap with computing.

    Args:
        max_num_tokens: the most tokens of a step.
        num_requests: returns how many prompts are not computed yet, at least 1, and how many
            requests run.
        reserve: allocates the blocks that a request needs to compute up to a token; returns False
            if there are not enough.
        chunk_end: returns where a request's chunk from one token to another has to end, if a
            snapshot of recurrent states is due before.
        stepped: true if chunks after the first are computed token by token. Then a prompt is
            computed up to its load in one chunk, or not at all.
    """

    def __init__(
        self,
        max_num_tokens: int,
        num_requests: Callable[[], tuple[int, int]],
        reserve: Callable[[LlmRequest, int], bool] = lambda *_: True,
        chunk_end: Callable[[LlmRequest, int, int], int] = lambda _request, _start, end: end,
        *,
        stepped: bool = False,
    ) -> None:
        self._max_num_tokens = max_num_tokens
        self._num_requests = num_requests
        self._reserve = reserve
        self._chunk_end = chunk_end
        self._stepped = stepped
        self._steps = StepPace()
        self._loads = LoadPace()
        self._peers = LoadPace()
        self._running: dict[int, _Running] = {}
        self._look_again: float | None = None
        self._gave_way = False
        self._exploring: WeakSet[LlmRequest] = WeakSet()

    def is_worth(self, request: LlmRequest, match: ExternalMatch) -> bool:
        """Returns whether to start the load of `match`: it may load a block before its turn.

        Sets ``request.loads_alone``.
        """
        num_prompts, num_running = self._num_requests()
        request.loads_alone = self._loads_alone(match, num_prompts, beside_others=num_running > 0)
        if not match.overlaps or match.follows or (self._stepped and match.position):
            return True
        prompt = self._prompt(request, match.position, loaded_from=match.end, end=match.end)
        rejected = self._loads.num_rejected
        self._exploring.discard(request)
        if should_start(
            prompt,
            self._steps,
            self._loads,
            max_tokens=self._max_num_tokens,
            num_prompts=num_prompts,
        ):
            if self._loads.num_rejected > rejected:
                self._exploring.add(request)
            return True
        count("engine.load", labels=(("decision", "compute"),))
        return False

    def _loads_alone(self, match: ExternalMatch, num_prompts: int, *, beside_others: bool) -> bool:
        """Returns whether it is predicted that nothing is computed beside the load of `match`.

        Args:
            match: the match.
            num_prompts: prompts that are computed in turns, this one included.
            beside_others: true if requests run.
        """
        loaded_s = self._loads.predict(match.num_tokens)
        chunk = self._max_num_tokens
        computed_s = self._steps.seconds_for_prompt(match.position, match.end, chunk)
        if loaded_s is None or computed_s is None:
            return False
        # Both together take ``loaded_s / (1 + loaded_s / computed_s)``.
        least = 1.0 if beside_others else (1 - _WORTH) / _WORTH
        return least * loaded_s < num_prompts * computed_s

    def add_chunk(self, batch: ScheduledBatch, loading: Iterable[LlmRequest]) -> list[LlmRequest]:
        """Adds a chunk of one `loading` request to `batch`, within the budget that it leaves.

        Loads of ``batch.loading_requests`` start with the step: chunks come in the next one. A
        step that gives another request its first token gets no chunk, unless the step before it
        got none for that reason.
        Returns the request if it needs its load no more: it has brought nothing, and is computed.
        """
        overtaken = []
        budget = self._max_num_tokens - sum(one.num_scheduled_tokens for one in batch.requests)
        alone = not batch.requests
        self._gave_way = not self._gave_way and any(map(_ends_prompt, batch.context_requests))
        if self._gave_way:
            budget = 0
        self._look_again = None
        for request in loading:
            if not request.load_end:
                continue
            join_head(request)
            if request.request_id not in self._running:
                self._begin(request)
            elif num_tokens := self.chunk(request, budget, alone=alone):
                start = request.num_computed_tokens
                end = self._chunk_end(request, start, start + num_tokens)
                if not self._reserve(request, end):
                    continue
                request.num_scheduled_tokens = end - start
                batch.context_requests.append(request)
                budget = 0  # a step of several would take longer than is predicted for each
                if end > request.load_end:
                    overtaken.append(request)
        return overtaken

    def _begin(self, request: LlmRequest) -> None:
        request.load_times.clear()  # those of an earlier load, which was cancelled
        start = request.num_computed_tokens
        pace = self._peers if request.load_follows else self._loads
        self._running[request.request_id] = _Running(
            RunningLoad(pace, request.load_end - start),
            time.monotonic(),
            start,
            explores=request in self._exploring,
        )

    def chunk(self, request: LlmRequest, budget: int, *, alone: bool) -> int:
        """Returns how many tokens of `request` to compute in the next step, in whole blocks.

        The chunk has at most `budget` tokens, none of them loaded already. It extends beyond the
        load if no block of the load has arrived.

        Args:
            request: a request whose load runs.
            budget: the step's tokens that no other request uses.
            alone: true if the step computes no other kind of request.
        """
        running = self._running[request.request_id]
        seconds = self._hear(request, running)
        position, met = request.num_computed_tokens, request.joins_load_at
        if self._stepped and (position or budget < met):
            return 0
        prompt = self._prompt(request, position, loaded_from=met, end=request.load_end)
        if request.load_follows and request.loaded_from == request.load_end:
            behind = next_chunk_behind(
                prompt,
                self._steps,
                begun=running.start,
                seconds=seconds,
                head=max(running.start, running.head),
                max_tokens=budget,
                step_tokens=self._max_num_tokens,
                alone=alone,
            )
            self._note(request, running, behind, seconds)
            return behind.tokens
        chunk = next_chunk(
            prompt,
            self._steps,
            running.load,
            seconds=seconds,
            max_tokens=budget,
            alone=alone,
        )
        self._note(request, running, chunk, seconds)
        if running.alone and (left := running.load.overdue_after() - seconds) > 0:
            self._look_after(left)
            return 0
        last = (request.load_end - 1) // prompt.tokens_per_block * prompt.tokens_per_block
        if running.explores and chunk.tokens > last - prompt.position > 0:
            return last - prompt.position  # to compute all would end the load before its first byte
        return chunk.tokens

    def end(self, request: LlmRequest) -> None:
        """Removes the load of `request`; the load or the request has ended."""
        running = self._running.pop(request.request_id, None)
        if running is None:
            return
        seconds = self._hear(request, running)
        # The time of a prompt that another engine still computed is not that of a connection.
        if not request.load_follows or (running.load.amount and not running.head):
            running.load.end(seconds)
        computed = request.num_computed_tokens > max(running.start, running.head)
        decision = "both" if computed and running.load.amount else "load"
        if computed and not running.load.amount:
            decision = "compute"
        count("engine.load", labels=(("decision", decision),))
        if running.predicted_s is not None:
            count("engine.load.predicted", seconds=running.predicted_s, took=seconds)

    def _hear(self, request: LlmRequest, running: _Running) -> float:
        """Records the load's progress; returns the seconds since its start."""
        for loaded_from, seconds in request.load_times:
            running.load.progress(request.load_end - loaded_from, seconds)
        request.load_times.clear()
        seconds = time.monotonic() - running.started
        running.load.progress(request.load_end - request.loaded_from, seconds)
        running.head = max(running.head, request.load_head)
        return seconds

    def note_step(self, plan: Iterable[SequenceStep], started: float, device: torch.device) -> None:
        """Adds a step that computed `plan` on `device`; it began at `started` (``perf_counter``).

        If a load runs beside the step, it waits for the device.
        """
        if device.type == "cuda" and self._running:
            torch.cuda.current_stream(device).synchronize()
        tokens, context = 0, 0.0
        for one in plan:
            if self._stepped and one.is_prompt and one.start:
                return  # its tokens take longer than those of a first chunk
            tokens += len(one.tokens)
            context += len(one.tokens) * (one.start + one.end) / 2
        self._steps.record(tokens, context, time.perf_counter() - started)

    def wait_seconds(self) -> float | None:
        """Returns the seconds until a silent load is due for a check; ``None``: none is."""
        return None if self._look_again is None else max(0.0, self._look_again - time.monotonic())

    def _note(self, request: LlmRequest, running: _Running, chunk: Chunk, seconds: float) -> None:
        if running.predicted_s is None and chunk.predicted is not None:
            end = self._steps.seconds_for_prompt(
                request.load_end, request.num_tokens, self._max_num_tokens
            )
            running.predicted_s = max(seconds, seconds + chunk.predicted.both_s - (end or 0.0))
            saved_s = chunk.predicted.loaded_s - chunk.predicted.both_s
            running.alone = saved_s < _WORTH * chunk.predicted.loaded_s
        if chunk.look_again_after is not None:
            self._look_after(chunk.look_again_after)

    def _prompt(
        self, request: LlmRequest, position: int, *, loaded_from: int, end: int
    ) -> LoadingPrompt:
        size = end if self._stepped else request.key_chain.tokens_per_block
        return LoadingPrompt(position, loaded_from, end, request.num_tokens, size)

    def _look_after(self, seconds: float) -> None:
        again = time.monotonic() + seconds
        self._look_again = again if self._look_again is None else min(self._look_again, again)


def _ends_prompt(request: LlmRequest) -> bool:
    end = max(request.num_computed_tokens, request.num_external_tokens)
    return end + request.num_scheduled_tokens >= request.num_tokens
