"""The process of vLLM's engine with a KV connector, in an interpreter that has vLLM.

The interpreter also has kvconnect's dependencies. One process is one life of an engine: a restart
is another process. Time on the scheduler's thread is measured around every call that the scheduler
makes to its connector, or that vLLM's offloading makes to its tier. The engine core runs in the
process. The calls of its worker do not count.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from inspect import getattr_static, isfunction
from pathlib import Path
from typing import Any

from kvconnect_bench.blocks.worker import methods, serve, take_stdout
from kvconnect_bench.engines.plan import OURS, TIERS
from kvconnect_bench.peers.vllm_engine import set_up_vllm

_CHECKOUT = Path(__file__).resolve().parents[4]
_HOST_NBYTES = 512 << 20
_TIMED_CALLS = 1000
_LOOKS = (
    ("kvconnect.digest.watch", "WeightWatch"),
    ("kvconnect.integrations.vllm.weights", "_Code"),
)
_ADMISSION = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc"),
    *("lookup", "on_schedule_end"),  # of a tier
)


def _offloading(tier: Mapping[str, Any]) -> dict[str, Any]:
    # vLLM's own offloading needs a GPU: `offload_on_cpu` replaces its copies.
    sys.path.insert(0, str(_CHECKOUT / "tests/engines/vllm/tier"))
    extra = {
        "spec_name": "OffloadOnCpu",
        "spec_module_path": "offload_on_cpu",
        "cpu_bytes_to_use": _HOST_NBYTES,
        "secondary_tiers": [dict(tier)],
    }
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


def connector_config(name: str, directory: Path) -> dict[str, Any] | None:
    """Returns vLLM's configuration for the connector `name`, whose store is in `directory`."""
    url = f"disk://{directory}?capacity=16GiB"
    if name == "none":
        return None
    if name == "KvConnect":
        found: dict[str, Any] = {
            "kv_connector": "KvConnect",
            "kv_connector_module_path": "kvconnect.integrations.vllm",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"url": url},
        }
    elif name == "KvConnectTier":
        module = "kvconnect.integrations.vllm_tier"
        found = _offloading({"type": "KvConnectTier", "module_path": module, "url": url})
    elif name == "fs":
        found = _offloading({"type": "fs", "root_dir": str(directory)})
    elif name == "ExampleConnector":
        extra = {"shared_storage_path": str(directory)}
        found = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra}
    elif name == "LMCache":
        os.environ |= {
            "LMCACHE_CHUNK_SIZE": "256",
            "LMCACHE_LOCAL_CPU": "False",
            "LMCACHE_MAX_LOCAL_CPU_SIZE": "1",
            "LMCACHE_LOCAL_DISK": f"file://{directory}/",
            "LMCACHE_MAX_LOCAL_DISK_SIZE": "16",
        }
        import_module("lmcache")
        found = {"kv_connector": "LMCacheConnectorV1"}
    else:
        raise ValueError(name)
    return {"kv_role": "kv_both", **found}


@dataclass(slots=True)
class Spent:
    """The seconds inside an object's methods.

    Attributes:
        wall: elapsed in all methods; what exceeds `admission` and `rest` is waiting.
        admission: of the thread's processor time, in the methods that admit a request.
        rest: of the thread's processor time, in all other methods.
    """

    wall: float = 0.0
    admission: float = 0.0
    rest: float = 0.0

    def __sub__(self, before: Spent) -> Spent:
        return Spent(
            self.wall - before.wall, self.admission - before.admission, self.rest - before.rest
        )


class Clock:
    """A clock of the time inside an object's methods, from the outermost call on.

    Args:
        target: the object, whose public methods are replaced by timed ones.
        own: seconds of processor time that the clock adds to a call; they are subtracted.
    """

    def __init__(self, target: Any, own: float = 0.0) -> None:
        self._own = own
        self._spent = Spent()
        self._inside = False
        for name in dir(type(target)):
            # Properties are not read: they may be the worker's.
            if not name.startswith("_") and isfunction(getattr_static(type(target), name)):
                setattr(target, name, self._timed(name, getattr(target, name)))

    @property
    def spent(self) -> Spent:
        """The time spent since the beginning."""
        return replace(self._spent)

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        admits = name in _ADMISSION

        def call(*arguments: Any, **keywords: Any) -> Any:
            if self._inside:
                return method(*arguments, **keywords)
            self._inside = True
            start, processor = time.perf_counter(), time.thread_time()
            try:
                return method(*arguments, **keywords)
            finally:
                processor = time.thread_time() - processor - self._own
                self._spent.wall += time.perf_counter() - start
                if admits:
                    self._spent.admission += processor
                else:
                    self._spent.rest += processor
                self._inside = False

        return call


class Watch:
    """A clock of kvconnect's checks of the weights, in this process.

    Attributes:
        is_on: if ``False``, checks are skipped and find no change.
        spent: seconds inside checks since the beginning.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.spent = 0.0
        for module, name in _LOOKS:
            kind = getattr(import_module(module), name)
            kind.changed = self._timed(kind.changed)

    def _timed(self, changed: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        def call(watched: Any) -> str | None:
            if not self.is_on:
                return None
            start = time.perf_counter()
            try:
                return changed(watched)
            finally:
                self.spent += time.perf_counter() - start

        return call


class _Nothing:
    def lookup(self) -> None:
        """Does nothing, which is as cheap as a call can be."""


def _cost_of_a_clock() -> float:
    """Measures the processor seconds that a clock adds to a call; the least of some tries."""
    found = []
    for _ in range(10):
        clock = Clock(target := _Nothing())
        for _ in range(_TIMED_CALLS):
            target.lookup()
        found.append(clock.spent.admission / _TIMED_CALLS)
    return min(found)


class ConnectedEngine:
    """An engine that runs until `stop`, or until the process ends."""

    def __init__(self) -> None:
        self._vllm = import_module("vllm")
        self._llm: Any = None
        self._core: Any = None
        self._clock: Clock | None = None
        self._tier_clock: Clock | None = None
        self._watch: Watch | None = None

    def start(self, model: str, connector: str, directory: str, longest: int) -> float:
        """Loads `model` in float32; returns the seconds that took."""
        start = time.perf_counter()
        config = connector_config(connector, Path(directory))
        self._llm = self._vllm.LLM(
            model=model,
            dtype="float32",
            max_model_len=longest,
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=True,
            block_size=32,
            kv_transfer_config=config,
        )
        self._core = self._llm.llm_engine.engine_core.engine_core
        if config is not None:
            self._clock = Clock(self._core.scheduler.connector, _cost_of_a_clock())
        if connector in TIERS:
            [tier] = import_module("offload_on_cpu").managers[-1].secondary_tiers
            self._tier_clock = Clock(tier, _cost_of_a_clock())
        if connector in OURS:
            self._watch = Watch()
        return time.perf_counter() - start

    def answer(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """Answers greedily, alone.

        Returns:
            ``first``: seconds to the first token; ``connector``, ``tier``: the part of those
            inside the connector and inside the tier, as fields of `Spent`; ``cached``: prompt
            tokens that were not computed; ``tokens``; ``steps``: for each step the seconds in all,
            inside the connector, inside the tier, and in kvconnect's checks of the weights.
        """
        params = self._vllm.SamplingParams(
            max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        engine = self._llm.llm_engine
        start, before = time.perf_counter(), self._spent()
        engine.add_request(str(start), {"prompt_token_ids": list(prompt)}, params)
        said: dict[str, Any] = {}
        steps: list[tuple[float, float, float, float]] = []
        while engine.has_unfinished_requests():
            began, looked, *known = time.perf_counter(), self._looked(), *self._spent()
            outputs = engine.step()
            now = time.perf_counter()
            connector, tier = (
                one.wall - other.wall for one, other in zip(self._spent(), known, strict=True)
            )
            steps.append((now - began, connector, tier, self._looked() - looked))
            if outputs and not said:
                parts = [
                    asdict(one - other) for one, other in zip(self._spent(), before, strict=True)
                ]
                said |= {"first": now - start, "connector": parts[0], "tier": parts[1]}
            for output in outputs:
                said |= {
                    "cached": output.num_cached_tokens,
                    "tokens": list(output.outputs[0].token_ids),
                }
        return {**said, "steps": steps}

    def settle(self) -> None:
        """Steps while there are requests; with a connector, for at least a second."""
        scheduler = self._core.scheduler
        connector = scheduler.connector
        until = time.monotonic() + 1.0
        while scheduler.has_requests() or (
            time.monotonic() < until if connector is not None else False
        ):
            self._core.step_fn()
            time.sleep(0.001)

    def stop(self) -> float:
        """Ends the engine and its connector's remaining saves; returns the seconds that took."""
        start = time.perf_counter()
        self._llm.llm_engine.engine_core.shutdown()
        return time.perf_counter() - start

    def watch(self, *, watches: bool) -> None:
        """Switches the weight checks of kvconnect's connector on or off."""
        if self._watch is not None:
            self._watch.is_on = watches

    def _looked(self) -> float:
        return 0.0 if self._watch is None else self._watch.spent

    def _spent(self) -> tuple[Spent, Spent]:
        """Returns the time spent inside the connector, and inside the tier."""
        clocks = self._clock, self._tier_clock
        connector, tier = (Spent() if clock is None else clock.spent for clock in clocks)
        return connector, tier


def main() -> None:
    """Serves until standard input ends."""
    answers = take_stdout()
    set_up_vllm()
    engine = ConnectedEngine()
    serve(answers, {"version": import_module("vllm.version").__version__}, methods(engine))


if __name__ == "__main__":
    main()
