"""What tests look at, and plant, inside the processes of an engine: functions for `Engine.inside`.

An engine in this process is one; else the core is one, with the connector's scheduler, and the
worker one, with its other half. What the functions take and return travels between them. Engines
whose core is a process take `KvConnect` from this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import faulty_store
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.engine.core import EngineCore

from kvconnect.integrations.vllm import KvConnect

__all__ = ["KvConnect"]

UTILITY = "kvconnect_tests"
"""The method that cores are given."""

OPERATIONS = ("lookup", "load", "save", "delete", "children")


@dataclass
class Inside:
    """What there is of an engine in a process.

    Attributes:
        scheduler: vLLM's.
        runner: vLLM's, of the model.
    """

    scheduler: Any = None
    runner: Any = None

    @classmethod
    def of_core(cls, core: EngineCore, *, alone: bool) -> Inside:
        """`alone`: its worker is in another process."""
        runner = None if alone else core.model_executor.driver_worker.worker.model_runner
        return cls(core.scheduler, runner)

    @property
    def scheduler_half(self) -> Any:
        """The connector's; ``None``: it is not here, or another's."""
        connector = None if self.scheduler is None else self.scheduler.connector
        return getattr(connector, "_scheduler", None)

    @property
    def worker_half(self) -> Any:
        """As `scheduler_half`."""
        if self.runner is None or not has_kv_transfer_group():
            return None
        return getattr(get_kv_transfer_group(), "_worker", None)


def in_worker(worker: Any, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """What vLLM calls as if it were a method of a worker."""
    return function(Inside(runner=worker.model_runner), *arguments)


def in_core(core: EngineCore, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """What vLLM calls as a method of its core, which it becomes."""
    return function(Inside.of_core(core, alone=True), *arguments)


setattr(EngineCore, UTILITY, in_core)


def flush(inside: Inside) -> None:
    """Until all that was saved is in the store."""
    if (half := inside.worker_half) is not None:
        assert half._worker._queue.flush(60)


def is_busy(inside: Inside) -> bool:
    """Whether there are requests, or blocks that are kept of some that ended."""
    return inside.scheduler is not None and inside.scheduler.has_requests()


def left(inside: Inside) -> dict[str, Any]:
    """What is held of any request; no value counts when nothing is."""
    found: dict[str, Any] = {}
    if (scheduler := inside.scheduler) is not None:
        found["requests"] = len(scheduler.requests)
        found["blocks"] = scheduler.kv_cache_manager.block_pool.get_usage()
    if (half := inside.scheduler_half) is not None:
        found["tracked"] = len(half._tracked)
        found["names"] = len(half._names)
        found["states"] = len(half._scheduler._plans) + len(half._scheduler._finding._prompts)
    if (half := inside.worker_half) is not None:
        found["names of the worker"] = len(half._names)
        found["loads"] = len(half._loads)
    return found


def num_groups(inside: Inside) -> int:
    """Of layers whose KV has blocks of its own."""
    scheduler = inside.scheduler
    return 0 if scheduler is None else len(scheduler.kv_cache_config.kv_cache_groups)


def prepare_stage(inside: Inside) -> None:
    """Makes what the later stages of a pipeline receive into, which vLLM forgets on a CPU (0.32).

    It makes it when it compiles or profiles, and it does neither with ``enforce_eager``.
    """
    if (runner := inside.runner) is not None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def uses_store(inside: Inside) -> bool:
    """Whether the store is asked: no breaker is open and the budget is not used up."""
    stores = []
    if (half := inside.scheduler_half) is not None:
        if half._scheduler._finding.budget.suspended:
            return False
        stores.append(half._scheduler._finding.store)
    if (half := inside.worker_half) is not None:
        stores.append(half._worker._store)
    return all(store.backend.available for store in stores)


# ---------------------------------------------------------------------- other weights


def scale(inside: Inside, factor: float) -> None:
    """Multiply some of the model's weights, past PyTorch's counter of versions.

    Those of norms: vLLM's linear layers on the CPU compute with packed copies of theirs.
    """
    if inside.runner is not None:
        for name, weight in inside.runner.get_model().named_parameters():
            if name.endswith("layernorm.weight"):
                weight.data.mul_(factor)


# ---------------------------------------------------------------------- what goes wrong


def plant(
    _inside: Inside,
    name: str,
    fault: str,
    operations: Sequence[str] = OPERATIONS,
    delay_s: float = 0.05,
) -> None:
    """From now on `operations` of the store ``faulty://name`` go wrong."""
    store = faulty_store.STORES[name]
    store.delay_s = delay_s
    store._operations = frozenset(operations)
    store.set(fault)


def heal(_inside: Inside, name: str) -> None:
    """Nothing of the store ``faulty://name`` goes wrong any more."""
    store = faulty_store.STORES[name]
    store.heal()
    store._operations = frozenset(OPERATIONS)


def num_hits(_inside: Inside, name: str) -> int:
    """Calls of the store ``faulty://name`` that went wrong."""
    return faulty_store.STORES[name].hits


def poison(inside: Inside) -> None:
    """Fill blocks that no request holds: what is not loaded is not what is computed with.

    With numbers that are none only where a load failed: vLLM's kernel multiplies slots of a block
    that are not written yet by zero.
    """
    if (half := inside.worker_half) is None:
        return
    caches = inside.runner.kv_caches
    for cache in caches:
        cache.fill_(777.0)
    take = type(half).take_invalid_blocks

    def take_and_poison() -> set[int]:
        invalid = take(half)
        for cache in caches:
            cache[sorted(invalid)] = float("nan")
        return invalid

    half.take_invalid_blocks = take_and_poison


def lose_loads(inside: Inside, lost: bool) -> None:
    """Blocks that were loaded do not come to the device, or do again."""
    if (half := inside.worker_half) is None:
        return
    copier = half._worker._access.copiers[0]
    if lost:
        copier.copy_in = lambda *_, **__: None
    else:
        del copier.copy_in
