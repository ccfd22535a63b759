"""Runs the steps of the engine: computes tokens, and processes the results."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from torch import Tensor

from kvconnect.cache.resource_manager import BaseKVCacheManager
from kvconnect.connector.runtime.transfers import StepOutcome
from kvconnect.engine.attachment import Attachment
from kvconnect.engine.explainer import Explainer
from kvconnect.engine.live_requests import LiveRequests
from kvconnect.engine.loaded_tokens import join_load, joined_loads, note_computed, note_loaded
from kvconnect.engine.model.forward_step import CachedLayer, ForwardStep
from kvconnect.engine.model.model import Model
from kvconnect.engine.model.sequence_step import (
    SequenceStep,
    first_scheduled_token,
    planned,
    sampled_rows,
)
from kvconnect.engine.model.state_memory import StateWork
from kvconnect.engine.ranks.leader import Leader, NoFollowers
from kvconnect.engine.request.live_request import LiveRequest, TokenRun
from kvconnect.engine.request.logprobs import top_tokens
from kvconnect.engine.sampling.sampler import Sampler, sampled_tokens
from kvconnect.engine.scheduler import Scheduler
from kvconnect.engine.snapshots import StateSnapshots
from kvconnect.errors import OutOfBlocks
from kvconnect.request import LlmRequest, RequestState, ScheduledBatch
from kvconnect.weak import weakly


class Engine:
    """Runs requests to their end, step by step. One thread owns it, see `EngineThread`.

    An error of one request, in the connector or here, ends that request. So does an error of the
    cache manager at an admission, if the manager declares that its errors belong to one request
    (`BaseKVCacheManager.raises_for_requests`). An error of a whole step is raised, and no step may
    follow: see `fail_all`.

    Args:
        model: the model.
        kv: the cache manager.
        connector: the connector, called in every step.
        scheduler: the scheduler over the same `kv`.
        layers: the memory of each layer in `kv`.
        followers: the other ranks; by default there are none.
        states: the states of recurrent layers; by default the model has none.
        explainer: explains why prompts were not reused.

    Attributes:
        stats: the counts since the start, and the present numbers of requests and blocks.
    """

    def __init__(
        self,
        model: Model,
        kv: BaseKVCacheManager,
        connector: Attachment,
        scheduler: Scheduler,
        layers: Sequence[CachedLayer],
        followers: Leader | None = None,
        *,
        states: StateSnapshots | None = None,
        explainer: Explainer | None = None,
    ) -> None:
        self._states = states
        self._model = model
        self._kv = kv
        self._connector = connector
        self._scheduler = scheduler
        scheduler.send_back = weakly(self._send_back)
        connector.set_worth(weakly(scheduler.beside_loads.is_worth))
        self._layers = layers
        self._followers = followers or NoFollowers()
        self._num_groups = 1 + max((layer.group for layer in layers), default=0)
        self._sampler = Sampler(model.eos_token_ids)
        self._explainer = explainer or Explainer(kv)
        self._live = LiveRequests(kv, connector, scheduler, self._sampler, self._explainer)
        self.stats = self._live.stats

    @property
    def process_ids(self) -> tuple[int, ...]:
        """The process ids of the ranks, by rank."""
        return (os.getpid(), *self._followers.process_ids)

    def step(self) -> bool:
        """Runs one step of the engine.

        Returns False if the step had no effect, so that the caller can sleep.
        """
        # schedule: admit requests that fit, allocate blocks, divide the budget of tokens
        batch = self._schedule()
        self._explainer.admitted(batch)
        failed = self._live.end_failed(batch)
        plan = self._plan(batch.requests)
        states = self._begin_states(plan)
        # connect: send the step to the other ranks and the connector, start its loads
        scheduled = bool(batch.requests or batch.loading_requests)
        if scheduled:
            self._connector.begin_step(batch, self._followers.work(plan, states))
        elif self._connector.expects_news():
            self._connector.begin_idle_step(self._followers.work(()))
        else:
            self._followers.wait()
            self._live.recount_blocks()  # the saves of aborted requests are withdrawn
            return failed or self._unblock()
        # forward: each layer waits for its loads, writes K/V, attends, and is saved
        started = time.perf_counter()
        logits = self._forward(plan)
        # agree: a request whose load failed gets no token from this step
        failed_loads = self._connector.agree() if scheduled else {}
        self._score_prompts(plan, logits)
        prefilled = self._advance(batch, failed_loads)
        # sample: append tokens, publish filled blocks, stream tokens, finish requests
        runs = self._sample(plan, batch, logits)
        self._scheduler.beside_loads.note_step(plan, started, self._model.device)
        self._kv.update_resources(batch)
        for request in joined_loads(batch):
            self._kv.update_resources(ScheduledBatch([request]))
        for run in runs:
            self._emit(run)
        for live in prefilled:
            self._live.finish(live, "length")
        # settle: loaded requests resume, the blocks of saved requests are freed
        outcome = self._connector.end_step()
        self._settle(outcome)
        failed |= self._live.end_failed()
        ended = bool(failed or outcome.loaded or outcome.failed or outcome.saved)
        if self._live.recount_blocks() or scheduled or ended:
            return True
        return self._connector.wait_seconds() is None and self._unblock()

    # ------------------------------------------------------------------ arrive

    def admit(self, live: LiveRequest) -> None:
        """Queues `live` for the next steps."""
        self._live.add(live)
        self._scheduler.waiting.append(live.request)
        self._connector.on_new_request(live.request)
        self._live.end_failed()

    def abort(self, request_id: int) -> None:
        """Ends a request now, if it has not ended yet."""
        if live := self._live.get(request_id):
            self._live.finish(live, "abort")

    def abort_all(self) -> None:
        """Ends every request now."""
        for live in self._live:
            self.abort(live.request.request_id)
        if self._connector.expects_news():  # sends workers the remaining saves
            self._connector.begin_idle_step(self._followers.work(()))
            self._settle(self._connector.end_step())

    def reset_cache(self) -> bool:
        """Drops all cached blocks; returns False and drops none if some are in use."""
        try:
            return self._kv.reset()
        finally:
            self._live.recount_blocks()

    def fail_all(self, error: BaseException) -> None:
        """Ends every request by `error`, without releasing blocks; no step may follow."""
        self._live.fail_all(error)  # from another thread, if this one is stuck

    def sizes(self) -> dict[str, float]:
        """Returns gauges, on any thread."""
        return self._live.sizes()

    def wait_seconds(self) -> float | None:
        """Returns the seconds to sleep after a step without effect; ``None``: until a wakeup."""
        look = self._scheduler.beside_loads.wait_seconds()
        waits = (self._connector.wait_seconds(), self._followers.longest_wait_s, look)
        return min((wait for wait in waits if wait is not None), default=None)

    def shutdown(self, *, failed: bool = False) -> None:
        """Drains the connector, and the other ranks' unless a step `failed`; blocks."""
        self._followers.close(failed=failed)
        try:
            self._connector.shutdown()
        finally:
            for request in self._scheduler.saving.values():
                request.state = RequestState.FINISHED  # no block is read any more
            self._followers.end(None)

    def abandon(self) -> None:
        """Ends the other ranks at once; on any thread, also while `shutdown` runs."""
        self._followers.end(0.0)

    # ------------------------------------------------------------------ schedule

    def _schedule(self) -> ScheduledBatch:
        """Returns the next batch.

        If blocks run out, the last admitted request is preempted.
        """
        while True:
            try:
                return self._scheduler.schedule()
            except OutOfBlocks:
                victim = self._scheduler.last_admitted()
                if victim is None:
                    return ScheduledBatch()  # until other requests' transfers end and free blocks
                self._send_back(victim)

    def _plan(self, requests: Sequence[LlmRequest]) -> tuple[SequenceStep, ...]:
        """Returns the tokens to compute of `requests`, and their blocks."""
        if not requests:
            return ()
        # The connector calls the same method: a user's manager may override only one of the two.
        others = range(1, self._num_groups)
        tables = [self._kv.get_group_cache_indices(requests, group) for group in others]
        return planned(requests, [self._kv.get_batch_cache_indices(requests), *tables])

    # ------------------------------------------------------------------ forward

    def _begin_states(self, plan: tuple[SequenceStep, ...]) -> StateWork | None:
        """Prepares the recurrent states before `plan`; returns the work of other ranks, if any."""
        if self._states is None:
            return None
        return self._states.begin(plan, self._scheduler.running, self._scheduler.loading.values())

    def _forward(self, plan: tuple[SequenceStep, ...]) -> Tensor | None:
        """Returns logits after each sequence's last ``num_wanted`` tokens, ``[rows, vocab]``."""
        if not plan:
            return None
        device = self._model.device
        slots = None if self._states is None else self._states.slots
        step = ForwardStep(plan, self._layers, self._connector, device=device, slots=slots)
        logits = self._model.forward(step)
        if self._states is not None:
            self._states.end()
        self.stats.steps += 1
        self._connector.end_forward()
        return logits

    # ------------------------------------------------------------------ agree

    def _advance(self, batch: ScheduledBatch, failed_loads: dict[int, int]) -> list[LiveRequest]:
        """Advances each request's valid position, except where its load failed.

        Returns the requests that end here, because they generate no token. Their last token does
        not count as computed, so that windows keep the blocks needed to compute it again in a
        request that continues the prompt.
        """
        prefilled = []
        for request in batch.requests:
            if request.request_id in failed_loads:
                continue
            if request.num_external_tokens:
                request.reused_store_tokens += (
                    request.num_external_tokens - request.num_computed_tokens
                )
            if request.state is not RequestState.GENERATION:
                request.computed_tokens += request.num_scheduled_tokens
                self._explainer.computed(request)
            # Drafts count as computed once they are verified.
            known = request.num_scheduled_tokens - len(request.draft_tokens)
            end = first_scheduled_token(request) + known
            if request.sampling_params.max_tokens == 0 and end == request.num_tokens:
                end -= 1
                prefilled.append(self._live[request.request_id])
            note_computed(request, end)
        for request_id, valid in failed_loads.items():
            if live := self._live.get(request_id):
                note_loaded(live.request, valid)
        return prefilled

    # ------------------------------------------------------------------ sample

    def _score_prompts(self, plan: tuple[SequenceStep, ...], logits: Tensor | None) -> None:
        """Records the log probabilities of prompts' tokens for the requests that want them."""
        stop = 0
        for one in plan:
            start, stop = stop, stop + one.num_wanted
            live = self._live.get(one.request_id)
            if logits is None or live is None or live.request.may_reuse:
                continue
            request = live.request
            count = request.sampling_params.prompt_logprobs
            tokens = request.tokens.view[one.start + 1 : min(one.end + 1, request.prompt_len)]
            if count is None or not len(tokens):
                continue
            try:
                live.take_prompt(
                    one.start + 1, top_tokens(logits[start:stop], tokens.tolist(), count)
                )
            except Exception as error:  # noqa: BLE001  of this request; it ends with the step
                self._live.note_error(live, error)

    def _sample(
        self, plan: tuple[SequenceStep, ...], batch: ScheduledBatch, logits: Tensor | None
    ) -> list[TokenRun]:
        """Samples the next tokens of requests whose tokens are all computed."""
        if logits is None:
            return []
        owners = [
            (row, request)
            for row, request in sampled_rows(plan, batch.requests)
            if request.num_computed_tokens == request.num_tokens
        ]
        if not owners:
            return []
        rows, requests = [row for row, _ in owners], [request for _, request in owners]
        # Requests with drafts are greedy, so each of their rows is independent.
        wanted = logits if len(rows) == len(logits) else logits[rows]
        tokens = self._sampler.sample(wanted, requests)
        runs = []
        start = 0
        while start < len(requests):
            live = self._live[requests[start].request_id]
            stop = start + 1 + len(live.request.draft_tokens)
            try:
                runs.append(self._take(live, tokens[start:stop], wanted[start:stop]))
            except Exception as error:  # noqa: BLE001  of this request; it ends with the step
                self._live.note_error(live, error)
            start = stop
        return runs

    def _take(
        self, live: LiveRequest, chosen: Sequence[int | Exception], logits: Tensor
    ) -> TokenRun:
        """Appends the tokens chosen from `logits`, and rewinds the rejected drafts."""
        tokens = sampled_tokens(chosen)
        count = live.request.sampling_params.logprobs
        run = live.take(tokens, None if count is None else top_tokens(logits, tokens, count))
        if run.num_rejected:
            self._kv.rewind(live.request, run.num_rejected)
            self._connector.on_rewind(live.request)
        self.stats.drafted_tokens += run.num_rejected + len(run.tokens) - 1
        self.stats.accepted_tokens += len(run.tokens) - 1
        return run

    def _emit(self, run: TokenRun) -> None:
        run.live.emit(run)
        if run.finish_reason is not None:
            self._live.finish(run.live, run.finish_reason)

    # ------------------------------------------------------------------ settle

    def _settle(self, outcome: StepOutcome) -> None:
        """Resumes loaded requests, queues those without blocks again, and releases saved ones."""
        for request_id, valid in outcome.loaded.items():
            if request := self._scheduler.loading.get(request_id):
                request.loaded_from = outcome.loaded_from.get(request_id, 0)
                self._scheduler.resume(request)
                if request_id in outcome.loaded_from:
                    join_load(request)
                else:
                    note_loaded(request, valid)
                # Others wait for them. A loaded state is released at the next snapshot.
                self._kv.update_resources(ScheduledBatch([request]))
        for request_id in outcome.saved:
            if request := self._scheduler.saving.pop(request_id, None):
                request.state = RequestState.FINISHED
                self._kv.free_resources(request)
        if outcome.failed:
            self._settle_failed(outcome)

    def _settle_failed(self, outcome: StepOutcome) -> None:
        for request_id, valid in outcome.failed.items():
            live = self._live.get(request_id)
            if live is None:
                continue
            note_loaded(live.request, valid)
            if request_id in outcome.requeue:
                self._send_back(live.request)
            elif live.request.state is RequestState.LOADING:
                self._scheduler.resume(live.request)
        while (victim := self._scheduler.one_too_many()) is not None:
            self._send_back(victim)

    def _send_back(self, request: LlmRequest) -> None:
        """Preempts `request`; its computed blocks stay cached until others need the memory."""
        self._connector.request_reset(request)
        self._kv.free_resources(request)
        self._scheduler.put_back(request)
        self._live[request.request_id].preemptions += 1
        self.stats.preemptions += 1

    def _unblock(self) -> bool:
        """Fails the next request: it never fits, none runs, and no transfer will free blocks."""
        scheduler = self._scheduler
        request = next(iter([*scheduler.running, *scheduler.waiting]), None)
        if request is None:
            return False
        live = self._live[request.request_id]
        needed = self._kv.needed_blocks(request)
        error = OutOfBlocks(
            f"request {request.request_id} needs {' + '.join(map(str, needed))} KV blocks; "
            f"{self._kv.get_num_free_blocks()} are free though no other request holds any"
        )
        self._live.fail(live, error)
        return True
