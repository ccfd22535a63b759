"""The tier class that vLLM calls, `KvConnectTier`."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvconnect.config import KvCacheConfig
from kvconnect.connector.data import LlmArgs
from kvconnect.connector.io.access import Access
from kvconnect.connector.io.strided import HostCopier
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.integrations.core.metrics_port import tell_metrics
from kvconnect.integrations.vllm.callers import executor_of_caller, scheduler_of_caller
from kvconnect.integrations.vllm.identity import vllm_version
from kvconnect.integrations.vllm_tier.identity import (
    HASH_NBYTES,
    ChunkNames,
    chunk_layout,
    chunks_digest,
)
from kvconnect.integrations.vllm_tier.lookups import Answers, Finder, Lookups
from kvconnect.integrations.vllm_tier.pause import StepPause
from kvconnect.integrations.vllm_tier.requests import NamedTokens, Parents
from kvconnect.integrations.vllm_tier.settings import KvConnectTierSettings
from kvconnect.integrations.vllm_tier.transfers import ChunkLoads, Saves
from kvconnect.integrations.vllm_tier.weights import TierWeights
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.layout import KvCacheLayout
from kvconnect.trace import warn_once

_KEY_NBYTES = HASH_NBYTES + 4
"""The size of vLLM's key of a chunk: a block hash and the KV cache group's number."""

_LATE_S = 2.0
"""The time for calls to end that were cancelled, or are at their deadline."""


@dataclass(frozen=True, slots=True)
class _Job:
    chunks: Sequence[bytes]
    is_load: bool
    submitted: float


class KvConnectTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not there
    """A store of kvconnect as a secondary tier of vLLM's ``TieringOffloadingSpec``.

    Selected with ``{"type": "KvConnectTier", "module_path": "kvconnect.integrations.vllm_tier",
    "url": "disk:///var/cache/kv?capacity=200GiB"}`` in ``secondary_tiers``; other settings are
    those of `KvConnectTierSettings`.

    vLLM makes the tier and calls it in its scheduler. Only `__init__`, `drain_jobs` and `shutdown`
    block, and steps in which a request waits for the store. Such a step blocks for 0.1 ms, or for
    at most 3 ms if vLLM has nothing to compute meanwhile. A fault of the store raises nothing:
    chunks that cannot be found, loaded or saved in time are computed.

    Args:
        offloading_spec: vLLM's ``OffloadingSpec``.
        primary_kv_view: uint8 or int8 ``[chunks, bytes of a chunk]``: vLLM's host memory, which
            loads write to and saves read.
        tier_type: name of this tier, for metrics.
        backpressure_detector: vLLM's detector, if the user configured one.
        settings: fields of `KvConnectTierSettings`.

    Raises:
        ConfigurationError: names the field, or what of the engine's configuration a tier cannot
            serve; nothing is left open.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        given = KvConnectTierSettings(**settings)
        if given.locality is not None:
            self.locality = Locality(given.locality)
        executor, self._scheduler = _engine_of_caller()
        digest = chunks_digest(offloading_spec, self._scheduler.vllm_config, given)
        rows = _rows(primary_kv_view)
        tokens = {
            group.group_id: group.tokens_per_block * offloading_spec.blocks_per_chunk
            for group in offloading_spec.config.groups
        }
        layout = chunk_layout(rows.shape[1], min(tokens.values()))
        self._names = ChunkNames(digest, layout)
        self._settings = given
        self._num_rows, self._row_nbytes = rows.shape
        with ExitStack() as undo:
            undo.callback(tell_metrics("vllm", given))
            self._access = _access(given, digest, rows, layout)
            undo.callback(self._access.close)
            self._weights = TierWeights(executor, self._rename)
            undo.callback(self._weights.close)
            self._opened = undo.pop_all()
        self._named = NamedTokens(self._scheduler)
        timeout_s = given.lookup_timeout_ms / 1e3
        self._lookups = Lookups(timeout_s)
        self._pause = StepPause()
        names = self._get_names
        self._finder = Finder(self._access, names, self._answered, timeout_s=timeout_s)
        self._loads = ChunkLoads(self._access, names, self._loaded, timeout_s=given.load_timeout_s)
        self._saves = Saves(
            self._access,
            names,
            self._saved,
            timeout_s=given.save_timeout_s,
            most_waiting=max(1, len(rows) // 2),
        )
        self._parents = Parents(tokens)
        self._jobs: dict[int, _Job] = {}
        self._results: deque[Any] = deque()
        self._changed = threading.Condition()
        self._closed = False

    # ------------------------------------------------------------------ lookups

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """Returns whether the store has a chunk; ``RETRY`` before its answer. Does not block.

        ``MISS`` also ends vLLM's scan of the chunks of a waiting prompt: see `Lookups`.
        """
        if len(key) != _KEY_NBYTES:
            warn_once(
                "vllm_tier.hash",
                f"{len(key) - 4} bytes of hash do not name a chunk safely; it is not looked up",
            )
            return LookupResult.MISS
        if not self._named.has(key, req_context) or not self._weights.are_named():
            return LookupResult.MISS
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        if found:
            self._parents.note(key, req_context)
        return LookupResult.HIT if found else LookupResult.MISS

    def on_new_request(self, req_context: Any) -> Any:
        """Records the request, and returns an empty context: vLLM's own policy of storing applies.

        By this policy vLLM offers each chunk to the tier once, when the chunk is complete.
        """
        self._named.begin(req_context.req_id)
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forgets the answers that the request was given."""
        self._lookups.forget(req_context.req_id)
        self._parents.forget(req_context.req_id)
        self._named.end(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        """Sends this step's questions to the store."""
        self._weights.end_schedule()
        if questions := self._lookups.take_questions():
            self._finder.find(questions)
        unanswered, self._lookups.unanswered = self._lookups.unanswered, False
        loads = any(job.is_load for job in tuple(self._jobs.values()))
        self._pause.end_step(waits=unanswered or loads)

    # ------------------------------------------------------------------ jobs

    def submit_load(self, job_metadata: Any) -> None:
        """Loads a job's chunks into their rows of the host memory. Does not block."""
        chunks = list(job_metadata.keys)
        rows = job_metadata.chunk_ids.tolist()
        self._begin(job_metadata.job_id, chunks, is_load=True)
        if not self._has_rows(rows) or not self._weights.look():
            self._end(job_metadata.job_id, 0, success=False)
            return
        self._loads.submit(job_metadata.job_id, chunks, rows)

    def submit_store(self, job_metadata: Any) -> None:
        """Stores a job's chunks, which stay unchanged until the job ends. Does not block."""
        pairs = list(zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True))
        context = job_metadata.req_context
        safe = [
            pair
            for pair in pairs
            if len(pair[0]) == _KEY_NBYTES and self._named.has(pair[0], context)
        ]
        self._begin(job_metadata.job_id, [chunk for chunk, _ in pairs], is_load=False)
        if not safe or not self._has_rows([row for _, row in safe]) or not self._weights.look():
            self._saved(job_metadata.job_id, 0)
            return
        self._saves.submit(job_metadata.job_id, self._parents.in_order(safe, context))

    def _has_rows(self, rows: Sequence[int]) -> bool:
        """Returns whether the host memory has all of `rows`; else their job fails."""
        if all(0 <= row < self._num_rows for row in rows):
            return True
        warn_once(
            "vllm_tier.rows", f"a job of vLLM's names chunks that its {self._num_rows} are not"
        )
        return False

    def get_finished_jobs(self) -> Iterable[Any]:
        """Returns the jobs that ended. Chunks that could not be loaded are missing from now on."""
        if not self._results:
            return ()
        results = [self._results.popleft() for _ in range(len(self._results))]
        for result, job in results:
            if job.is_load and not result.success:
                loaded = set(result.successful_keys or ())
                self._lookups.missing([chunk for chunk in job.chunks if chunk not in loaded])
        return [result for result, _ in results]

    def drain_jobs(self) -> None:
        """Blocks until no job is under way: loads are cancelled, saves run to their end.

        Returns within ``save_timeout_s`` + 2 s. vLLM calls this when its caches are reset.
        """
        self._loads.cancel()
        drained = self._wait(self._settings.save_timeout_s + _LATE_S)
        if not drained:
            self._abandon()
        # Abandoned jobs keep the names that they started with.
        self._weights.note_reset(device_is_empty=drained and self._device_is_empty())

    def shutdown(self) -> None:
        """Drains jobs and closes the store.

        Blocks for ``save_timeout_s`` and a few seconds at most.

        Raises:
            BackendUnavailable: a copy from or to the host memory did not end, which has to stay.
        """
        if self._closed:
            return
        self._closed = True
        self._access.store.begin_close()
        self._loads.cancel()
        if not self._wait(self._settings.save_timeout_s):
            self._saves.close()
        drained = self._wait(_LATE_S)
        self._opened.close()
        if not drained:
            raise BackendUnavailable(f"{self.tier_type}: the store's thread does not answer")

    def _wait(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs, timeout_s)

    def _abandon(self) -> None:
        """Fails all jobs, since the store's thread does not answer any more."""
        for number in list(self._jobs):
            self._end(number, 0, success=False)

    def _device_is_empty(self) -> bool:
        """Returns whether vLLM's own cache holds no block, of requests or of prefixes."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return not pool.get_usage() and not len(pool.cached_block_hash_to_block)

    def _rename(self, weights: str) -> None:
        """Gives chunks other names from now on, which `weights` is a part of."""
        self._names = self._names.with_weights(weights)
        self._lookups.miss_all()

    def _get_names(self) -> ChunkNames:
        return self._names

    def _begin(self, number: int, chunks: Sequence[bytes], *, is_load: bool) -> None:
        with self._changed:
            self._jobs[number] = _Job(chunks, is_load, time.monotonic())

    # ------------------------------------------------------------------ on threads of the store

    def _answered(self, answers: Answers) -> None:
        self._lookups.answer(answers)
        self._pause.tell()

    def _loaded(self, number: int, chunks: Sequence[bytes]) -> None:
        job = self._jobs.get(number)
        whole = job is not None and len(chunks) == len(job.chunks)
        self._end(number, len(chunks), success=whole, loaded=() if whole else tuple(chunks))

    def _saved(self, number: int, stored: int) -> None:
        job = self._jobs.get(number)
        self._end(number, stored, success=job is not None and stored == len(job.chunks))

    def _end(
        self, number: int, moved: int, *, success: bool, loaded: tuple[bytes, ...] = ()
    ) -> None:
        with self._changed:
            job = self._jobs.pop(number, None)
            if job is None:  # it was abandoned
                return
            result = JobResult(
                job_id=number,
                success=success,
                successful_keys=loaded or None,
                transfer_time=time.monotonic() - job.submitted,
                transfer_bytes=moved * self._row_nbytes,
            )
            self._results.append((result, job))
            self._changed.notify_all()
        if job.is_load:
            self._pause.tell()


def _engine_of_caller() -> tuple[Any, Any]:
    """Returns the executor and the scheduler of the engine core that is being made on this thread.

    Raises:
        ConfigurationError: there is none.
    """
    executor, scheduler = executor_of_caller(), scheduler_of_caller()
    if executor is None or not hasattr(scheduler, "vllm_config"):
        raise ConfigurationError(
            f"KvConnectTier: vLLM {vllm_version()} does not show a tier its engine, so that models "
            "cannot be told apart, and pictures and weights that are replaced while it runs would "
            "go unseen; use the connector KvConnect"
        )
    return executor, scheduler


def _rows(view: memoryview) -> torch.Tensor:
    """Returns `view` as uint8 ``[chunks, bytes of a chunk]``, without a reference to `view`.

    vLLM releases its memory when the tiers are shut down, which a buffer in use would prevent.
    """
    array = np.asarray(view)
    if array.ndim != 2 or not array.flags.c_contiguous or array.itemsize != 1:
        raise ConfigurationError(
            f"primary_kv_view: {array.dtype}{list(array.shape)} in steps of {array.strides}; bytes "
            "[chunks, bytes of a chunk] without gaps are served, which vLLM 0.32 and 0.33 have"
        )
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(memory)).view(array.shape)


def _access(
    settings: KvConnectTierSettings, digest: bytes, rows: torch.Tensor, layout: KvCacheLayout
) -> Access:
    """Returns the opened access to the store of `settings`, for the host memory `rows`.

    Raises:
        ConfigurationError: the store cannot be opened, or is none for this.
    """
    args = LlmArgs(
        model="",
        kv_cache_config=KvCacheConfig(tokens_per_block=layout.tokens_per_block),
        kv_connector_config=settings.connector_config(),
        layouts=(layout,),
        model_digest=digest,
    )
    pool = PagedKv.from_pool(rows.view(layout.flat_shape(len(rows))), layout)
    return Access.open(args, [pool], HostCopier)
