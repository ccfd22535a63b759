"""The worker's half: calls of vLLM in a step as calls of the built-in pair."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from kvconnect.connector.data import Direction, LlmArgs, TransferFailure
from kvconnect.connector.io.orders import LoadBlocks
from kvconnect.connector.io.strided import StridedPlanes
from kvconnect.connector.pair.worker import OffloadWorker
from kvconnect.connector.stream import CpuStream, ForwardStream
from kvconnect.integrations.vllm.messages import StepMeta, WorkerReport
from kvconnect.integrations.vllm.weights import WatchedWeights
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.trace import warn_once

# In a step that computes nothing, vLLM's loop repeats at once: this is its wait for a load's end,
# which ends the wait. Each turn keeps the load's threads from the interpreter.
_IDLE_S = 0.003
_OTHER_WEIGHTS = "the model's weights were changed since they were named"


@dataclass(slots=True)
class StepResults:
    """The transfers that ended since the last step, by vLLM's ids.

    Attributes:
        saved, loaded: transfers that are over; loads that failed, too.
        failed: loads that failed without a valid part.
    """

    saved: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class WorkerHalf:
    """Drives `OffloadWorker` from vLLM's model runner. No method raises for the store.

    Once the model's weights have changed, nothing is saved and every load fails, until the
    scheduler gives the new weights a name.

    Args:
        llm_args: the arguments of the pair, for this rank.
    """

    def __init__(self, llm_args: LlmArgs) -> None:
        self._worker = OffloadWorker(llm_args)
        self._layouts = llm_args.layouts
        self._stream: ForwardStream = CpuStream()
        self._on_cuda = False
        self._meta = StepMeta()
        self._names: dict[int, str] = {}
        self._loads: dict[int, LoadBlocks] = {}
        self._invalid: set[int] = set()
        self._failed: dict[int, int] = {}
        self._void: set[int] = set()  # loads of what other weights computed
        self._weights: WatchedWeights  # from `register` on
        self._news = threading.Event()
        self._worker.set_wakeup(self._news.set)

    def register(self, pools: Sequence[PagedKv | StridedPlanes], weights: WatchedWeights) -> None:
        """Registers the planes of each pool group and the model's weights.

        Raises:
            ConfigurationError: ``staging_bytes`` is below one block.
        """
        self._weights = weights
        self._on_cuda = pools[0].device.type == "cuda"
        self._worker.register_planes(pools)

    # ------------------------------------------------------------------ one step

    def handle_preemptions(self, meta: StepMeta) -> None:
        """Saves held blocks of requests that are about to lose their blocks."""
        if not meta.preempted:
            return
        is_named = self._are_named(meta)
        for request_id, num_committed in meta.preempted:
            self._worker.request_reset(request_id, num_committed if is_named else 0)

    def bind(self, meta: StepMeta) -> None:
        """Sets the instructions of this step."""
        self._meta = meta
        self._names.update(meta.names)
        offload = meta.offload
        if offload is not None:
            self._loads.update((load.request_id, load) for load in offload.loads)
        self._weights.begin_step(meta.weights)
        self._worker.bind_connector_meta(offload)
        for request_id in meta.cancelled:
            self._worker.cancel(request_id)

    def clear(self) -> None:
        """Ends the step."""
        self._worker.clear_connector_meta()
        self._meta = StepMeta()

    def start_load(self) -> None:
        """Starts this step's loads; does not block."""
        offload = self._meta.offload
        if offload is None or not offload.loads:
            return
        self._worker.start_load_kv(self._current_stream())

    def wait_for_save(self) -> None:
        """Stages the blocks that the step filled, after its work.

        vLLM calls this also if the step ends by an error, or by a signal that ends the process.
        Then the blocks do not match their keys, and nothing is staged.
        """
        is_named = True
        if sys.exc_info()[0] is not None:
            self._worker.clear_connector_meta()
        elif (self._meta.offload is not None or self._loads) and not self._are_named(self._meta):
            is_named = False
            self._worker.drop_saves()
        self._worker.wait_for_save(self._current_stream())
        if not is_named:
            self._void_loads()  # whose blocks this step may have used

    def _are_named(self, meta: StepMeta) -> bool:
        """Returns whether keys name the present weights; checks the weights for a change."""
        return not meta.weights.is_stopped and self._weights.look() is None

    def _void_loads(self) -> None:
        """Fails every load that has not ended."""
        for load in self._loads.values():
            if load.request_id not in self._void:
                self._void.add(load.request_id)
                self._worker.cancel(load.request_id)

    def take_results(self) -> StepResults:
        """Returns the transfers that ended. Waits a moment in a step that computes nothing."""
        if self._meta.is_idle and self._loads:
            self._news.wait(_IDLE_S)
        self._news.clear()
        results = StepResults()
        saved, loaded = self._worker.get_finished([], [])
        results.saved.update(self._names.pop(request_id) for request_id in saved)
        for request_id in loaded:
            if request_id in self._void:  # other weights computed its blocks
                start = self._loads[request_id].start
                void = TransferFailure(request_id, Direction.LOAD, start, _OTHER_WEIGHTS)
                self._take_failure(void, results)
                continue
            del self._loads[request_id]
            results.loaded.add(self._names.pop(request_id))
        for failure in self._worker.get_failed():
            self._take_failure(failure, results)
        return results

    def _take_failure(self, failure: TransferFailure, results: StepResults) -> None:
        request_id = failure.request_id
        if failure.direction is Direction.SAVE:
            results.saved.add(self._names.pop(request_id))
            return
        load, name = self._loads.pop(request_id), self._names.pop(request_id)
        if request_id in self._void:
            self._void.discard(request_id)
            failure = replace(failure, num_valid_tokens=load.start)
        warn_once(
            "vllm.load",
            f"a load failed, its tokens are computed: {failure.reason}",
        )
        self._failed[request_id] = failure.num_valid_tokens
        results.loaded.add(name)
        if load.divisible:
            size = self._layouts[0].tokens_per_block
            first = max(0, failure.num_valid_tokens - load.start) // size
            self._invalid.update(block.block_id for block in load.blocks[first:])
        else:
            results.failed.add(name)

    def take_invalid_blocks(self) -> set[int]:
        """Returns and clears the ids of blocks that did not load."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def build_report(self) -> WorkerReport | None:
        """Returns the report of this step for the scheduler."""
        meta = self._worker.build_worker_meta()
        change = self._weights.change
        if meta is None and not self._failed and change is None:
            return None
        failed, self._failed = self._failed, {}
        return WorkerReport(() if meta is None else (meta,), failed, change)

    def shutdown(self) -> None:
        """Writes staged blocks, up to ``save_timeout_s``. Idempotent."""
        if self._worker.has_unstaged and self._weights.look() is not None:
            self._worker.drop_saves()
        self._worker.shutdown()

    def _current_stream(self) -> ForwardStream:
        return torch.cuda.current_stream() if self._on_cuda else self._stream
