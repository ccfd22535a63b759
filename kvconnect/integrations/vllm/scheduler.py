"""The scheduler's half: calls of vLLM as calls of the built-in pair."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from kvconnect.connector.data import LlmArgs
from kvconnect.digest.doubts import Doubt, note_doubt
from kvconnect.errors import ConfigurationError
from kvconnect.integrations.core.load_choice import LoadChoice
from kvconnect.integrations.core.offload import EngineScheduler
from kvconnect.integrations.core.requests import PRIORITY
from kvconnect.integrations.vllm.messages import StepMeta, WorkerReport
from kvconnect.integrations.vllm.requests import RequestNames, Roles, Tracked
from kvconnect.integrations.vllm.steps import GroupOrder, StepReader, held_blocks, num_computed
from kvconnect.integrations.vllm.weights import WeightNames
from kvconnect.tokens import LateTokens
from kvconnect.trace import count, warn_once

NUM_TOKENS = "kvconnect_num_tokens"
"""In ``kv_transfer_params``: the number of leading tokens that the producer saves."""

# Between two lookups of tokens that a producer announced.
_LOOK_S = 0.01
# In a step that computes nothing, vLLM's loop repeats at once: this is its wait for a lookup.
# A turn costs the scheduler as much as blocks of a prompt do: long enough for a disk's answer.
_IDLE_S = 0.003
_RESET = "reset_prefix_cache(reset_connector=True)"


class SchedulerHalf:
    """Drives `EngineScheduler` from vLLM's scheduler. No method blocks or raises for the store.

    Args:
        llm_args: the arguments of the pair.
        extra_key: see `kvconnect.integrations.core.requests.extra_key_of`.
        roles: what is allowed.
        choice: whether to load or to compute.
        groups: vLLM's KV cache groups, in the order of ``llm_args.layouts``.
    """

    def __init__(
        self,
        llm_args: LlmArgs,
        extra_key: str | None,
        roles: Roles,
        choice: LoadChoice,
        groups: GroupOrder,
    ) -> None:
        self._roles = roles
        self._choice = choice
        self._size = llm_args.tokens_per_block
        self._holds = llm_args.kv_connector_config.save_on == "finish"
        # Below the lowest priority of `EngineSettings.without_saves`, a consumer's.
        self._steps = StepReader(self._size, PRIORITY if roles.saves else 0, groups)
        self._groups = groups
        self._scheduler = EngineScheduler(llm_args)
        self._request_names = RequestNames(llm_args, extra_key, roles)
        self._tracked: dict[str, Tracked] = {}
        self._names: dict[int, str] = {}  # all tracked requests, by the pair's ids
        self._starting: list[tuple[Tracked, Sequence[Sequence[int]]]] = []
        self._ending: dict[int, str] = {}  # and the next for the next step's metadata
        self._cancelled: list[int] = []
        self._dropped: list[int] = []
        self._weights = WeightNames()

    # ------------------------------------------------------------------ finding

    def on_new_request(self, request: Any) -> None:
        """Starts to look `request` up."""
        self._track(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Returns the stored tokens beyond `num_computed_tokens`; ``None``: call again.

        May be called at any time.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None or request.skip_reading_prefix_cache or self._weights.is_stopped:
            return 0, False
        if tracked.llm is None and not self._has_started(tracked):
            return (None, False) if request.request_id in self._tracked else (0, False)
        llm = tracked.started
        if tracked.preemptions != request.num_preemptions:
            self._reset(tracked)
        tracked.grow()
        found, is_async = self._scheduler.ask_num_new_matched_tokens(llm, num_computed_tokens)
        if not self._roles.loads:
            # The answer is awaited nevertheless: only blocks that the store lacks are saved, and a
            # request of one token may have no other step to order the save.
            return None if found is None else 0, False
        if found is not None and self._is_to_come(tracked, num_computed_tokens + found):
            return None, False
        if found is not None and not self._is_worth(tracked, num_computed_tokens, found):
            return 0, False
        return found, is_async

    def _is_worth(self, tracked: Tracked, start: int, found: int) -> bool:
        """Returns whether to load the `found` tokens from `start` on; chooses once for the same."""
        if (tracked.offered_at, tracked.found) != (start, found):
            tracked.offered_at, tracked.found = start, found
            tracked.load = None
            if found:
                prompt_end = tracked.request.num_tokens
                tracked.load = self._choice.choose(start, start + found, prompt_end)
        return tracked.load is not None

    def _is_to_come(self, tracked: Tracked, end: int) -> bool:
        """Returns whether a producer announced more than `end` tokens, which may soon be stored."""
        if not tracked.told:
            return False
        most = min(tracked.told, tracked.request.num_tokens - 1)
        now = time.monotonic()
        if end >= most - most % self._size or now - tracked.since > self._roles.producer_timeout_s:
            tracked.told = 0
            return False
        if now - tracked.looked_at >= _LOOK_S:
            tracked.looked_at = now
            self._scheduler.request_reset(tracked.started)
        return True

    def _track(self, request: Any) -> None:
        tracked = Tracked(request, time.monotonic(), preemptions=request.num_preemptions)
        doubt = self._request_names.begin(tracked)
        if self._weights.is_stopped:
            doubt = Doubt.WEIGHTS_CHANGED
        if doubt is not None:
            note_doubt(doubt)
            return
        params = getattr(request, "kv_transfer_params", None)
        if isinstance(params, dict) and isinstance(told := params.get(NUM_TOKENS), int):
            tracked.told = told
        self._tracked[request.request_id] = tracked
        self._has_started(tracked)

    def _has_started(self, tracked: Tracked) -> bool:
        """Returns whether the pair has the request; adds it to the pair once its keys are known."""
        if tracked.llm is not None:
            return True
        llm = self._request_names.make(tracked)
        if isinstance(llm, Doubt):
            self._forget(tracked, llm)
        if llm is None or isinstance(llm, Doubt):
            return False
        tracked.llm, tracked.num_tokens = llm, llm.prompt_len
        self._names[llm.request_id] = tracked.request.request_id
        self._scheduler.on_new_request(llm)
        return True

    @staticmethod
    def _are_tokens(tokens: LateTokens) -> bool:
        """Returns whether `tokens` can be converted, which the store's thread has not done yet."""
        try:
            tokens[:0]
        except ConfigurationError:
            return False
        return True

    def _forget(self, tracked: Tracked, doubt: Doubt) -> None:
        self._tracked.pop(tracked.request.request_id, None)
        note_doubt(doubt)

    def _reset(self, tracked: Tracked) -> None:
        """Resets a preempted request, which has lost its blocks and is scheduled again."""
        tracked.preemptions = tracked.request.num_preemptions
        tracked.computed = tracked.num_full = tracked.found = 0
        self._scheduler.request_reset(tracked.started)

    # ------------------------------------------------------------------ one step

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Records the `blocks` of `request`, and how many tokens are loaded into them."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.llm is None:
            return
        llm = tracked.llm
        if tracked.tokens.array is None and not self._are_tokens(tracked.tokens):
            del self._names[llm.request_id]
            self._scheduler.request_aborted(llm)
            self._forget(tracked, Doubt.BAD_TOKENS)
            return
        llm.num_connector_matched_tokens = num_external_tokens
        self._scheduler.update_state_after_alloc(llm, [])
        if num_external_tokens:
            tracked.loading = True
            tracked.computed = tracked.offered_at + num_external_tokens
            self._starting.append((tracked, blocks.get_block_ids()))
            if tracked.load is not None:
                self._choice.start(tracked.load)

    def build_connector_meta(self, output: Any) -> StepMeta:
        """Returns the workers' instructions for the step of vLLM's ``SchedulerOutput``."""
        meta = self._build_meta(output)
        self._choice.begin_step(*num_computed(output))
        return meta

    def _build_meta(self, output: Any) -> StepMeta:
        is_idle = output.total_num_scheduled_tokens == 0
        if is_idle:
            self._scheduler.wait_for_answer(_IDLE_S)
        starting, self._starting = self._starting, []
        if starting or not is_idle:
            self._weights.note_step()
        preempted = self._preempted(output)  # a request may be resumed in the same step
        step = self._steps.read(output, self._tracked, starting)
        if step is None:
            offload = self._scheduler.build_idle_meta()
        else:
            offload = self._scheduler.build_connector_meta(step)
        if offload is None and not (self._ending or self._cancelled or preempted or is_idle):
            return StepMeta(weights=self._weights.meta)
        names = self._ending
        self._ending = {}
        if offload is not None:
            for load in offload.loads:
                names[load.request_id] = self._names[load.request_id]
        cancelled, self._cancelled = tuple(self._cancelled), []
        return StepMeta(
            offload,
            names,
            cancelled,
            preempted,
            is_idle=is_idle,
            weights=self._weights.meta,
        )

    def _preempted(self, output: Any) -> tuple[tuple[int, int], ...]:
        """Returns the requests that lose their blocks; empty unless workers hold blocks.

        Workers hold blocks until a request ends if ``save_on`` is "finish".
        """
        if not self._holds:
            self._dropped.clear()
            return ()
        known = map(self._tracked.get, output.preempted_req_ids or ())
        found = [(request_id, 0) for request_id in self._dropped]
        self._dropped.clear()
        found += [
            (one.llm.request_id, one.computed)
            for one in known
            if one is not None and one.llm is not None
        ]
        return tuple(found)

    def update_connector_output(self, output: Any) -> None:
        """Reads the workers' reports of the oldest step that has not ended, which ends now."""
        self._choice.end_step()
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._scheduler.update_from_workers(report.ranks)
            for request_id, valid in report.failed.items():
                tracked = self._tracked.get(self._names.get(request_id, ""))
                if tracked is not None:
                    count("connector.load.failed")
                    self._scheduler.load_failed(tracked.started, valid)
                    tracked.computed, tracked.num_full = min(tracked.computed, valid), 0
        for name in output.finished_recving or ():
            if (tracked := self._tracked.get(name)) is not None:
                tracked.loading = False
                if tracked.load is not None:
                    self._choice.end(tracked.load, max(0, tracked.computed - tracked.offered_at))
        change = report.change if isinstance(report, WorkerReport) else None
        if change is not None and self._weights.is_news(change):
            self._take_change(change.how, can_begin=self._weights.can_begin(change))
        if self._weights.is_stopped:
            self._drop_all()
            if self._weights.begins_later and not self._is_loading:
                self._begin()

    # ------------------------------------------------------------------ the end

    def request_finished(
        self, request: Any, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether blocks of `request` are kept until saved, and the consumer's settings."""
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None or tracked.llm is None:
            return False, None
        llm = tracked.llm
        del self._names[llm.request_id]
        if tracked.loading:
            # The blocks stay until the load is reported, and only until then.
            self._scheduler.request_aborted(llm)
            self._cancelled.append(llm.request_id)
            return False, None
        if tracked.preemptions != request.num_preemptions:
            self._scheduler.request_reset(llm)
            self._scheduler.request_aborted(llm)
            self._dropped.append(llm.request_id)  # no step may have reported it
            return False, None
        tracked.grow()
        in_flight = getattr(request, "num_in_flight_tokens", 0)
        llm.num_computed_tokens = max(0, request.num_computed_tokens - in_flight)
        first = held_blocks(self._groups.ordered(block_ids)[0]) if block_ids else []
        is_kept = self._scheduler.request_finished(llm, first)
        if is_kept:
            self._ending[llm.request_id] = request.request_id
        if not self._roles.tells:
            return is_kept, None
        saved = min(llm.num_computed_tokens, llm.prompt_len)
        return is_kept, {NUM_TOKENS: saved - saved % self._size}

    # ------------------------------------------------------------------ other weights

    def cache_discarded(self, *_: object) -> None:
        """Records that the device's cache loses its content, so that no held block is saved.

        Workers learn only in the next step which requests have lost their blocks before.
        """
        known = [one.llm for one in self._tracked.values() if one.llm is not None]
        self._dropped += [llm.request_id for llm in known]

    def adapter_loads(self, lora: Any) -> None:
        """Records that vLLM loads the adapter of the ``LoRARequest`` `lora` before any request."""
        self._request_names.adapter_loads(lora)

    def weights_changed(self, how: str) -> None:
        """Records that the model's weights are others from the next step on.

        Args:
            how: the cause of the change, for the log.
        """
        if self._weights.is_stopped:
            self._weights.stop(begins_later=False)
        else:
            self._take_change(how, can_begin=self._weights.can_begin())

    def reset_cache(self, *, device_is_empty: bool) -> bool:
        """Gives the weights a new name if they have changed, else keeps their name.

        With the old name, saved blocks are found again.

        Args:
            device_is_empty: the engine's own cache holds nothing.

        Returns:
            Whether it was done. After a change: only if the device is empty and no load runs.
        """
        is_empty = device_is_empty and not self._is_loading
        self._weights.note_reset(device_is_empty=is_empty)
        if not self._weights.is_stopped:
            return True
        if is_empty:
            self._begin()
        return is_empty

    @property
    def _is_loading(self) -> bool:
        return any(one.loading for one in self._tracked.values())

    def _take_change(self, how: str, *, can_begin: bool) -> None:
        if can_begin and not self._is_loading:
            self._begin()
            return
        self._weights.stop(begins_later=can_begin)
        self._drop_all()
        if not can_begin:
            warn_once(f"vllm.weights {how}", f"nothing is loaded or saved until a {_RESET}: {how}")

    def _begin(self) -> None:
        """Names the present weights; running requests continue without the store."""
        self._request_names.separate(self._weights.begin())
        self._drop_all(is_restart=True)

    def _drop_all(self, *, is_restart: bool = False) -> None:
        """Drops all requests except those with a running load.

        Args:
            is_restart: requests that have computed nothing are looked up again.
        """
        for tracked in [one for one in self._tracked.values() if not one.loading]:
            if (llm := tracked.llm) is not None:
                self._scheduler.request_reset(llm)
                self._scheduler.request_aborted(llm)
                del self._names[llm.request_id]
                self._dropped.append(llm.request_id)
                tracked.llm = None
            is_running = tracked.computed > 0 and (
                tracked.preemptions == tracked.request.num_preemptions
            )
            if is_running or not is_restart:
                self._tracked.pop(tracked.request.request_id)
            else:
                tracked.preemptions = tracked.request.num_preemptions
                tracked.computed = tracked.num_full = tracked.found = 0
                self._has_started(tracked)

    def shutdown(self) -> None:
        """Closes the store. Idempotent."""
        self._request_names.close()
        self._scheduler.shutdown()
        self._tracked.clear()
