"""The decision whether names of chunks name the model's weights, in a process without weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvconnect.digest.watch import WeightWatch
from kvconnect.integrations.vllm.callers import model_of
from kvconnect.integrations.vllm.weights import WeightCalls, WeightNames
from kvconnect.trace import warn_once

_RESET = "reset_prefix_cache(reset_connector=True)"


class TierWeights:
    """Detects that the model's weights were replaced, and gives new ones a name of this process.

    If the worker is in the scheduler's process, its weights are watched. Otherwise every call of
    the workers that may change the weights counts as a change, including users' own functions.
    Belongs to the scheduler's thread.

    Args:
        executor: vLLM's, of the engine core.
        renamed: called with a name for the weights of now, as soon as they have one.
    """

    def __init__(self, executor: Any, renamed: Callable[[str], None]) -> None:
        self._renamed = renamed
        self._names = WeightNames()
        # ``None`` unless the only worker is in this process.
        self._model = model_of(getattr(getattr(executor, "driver_worker", None), "worker", None))
        self._watch: WeightWatch | None = None
        self._is_checked = False
        self._calls = WeightCalls(executor, self._change, reports_unknown=self._model is None)

    def are_named(self) -> bool:
        """Returns whether chunks of the present weights have names; checks at most once a step."""
        if not self._is_checked:
            self._is_checked = True
            self.look()
        return not self._names.is_stopped

    def look(self) -> bool:
        """Checks for a change; returns whether chunks of the present weights have names."""
        if self._watch is not None and not self._names.is_stopped:
            how = self._watch.changed()
            if how is not None:
                self._change(how)
        return not self._names.is_stopped

    def end_schedule(self) -> None:
        """Records that a step begins to compute."""
        if self._model is not None and self._watch is None and not self._names.is_stopped:
            self._watch = WeightWatch.of(self._model())
        self._names.note_step()
        self._is_checked = False

    def note_reset(self, *, device_is_empty: bool) -> None:
        """Records a reset of vLLM's caches; names unnamed weights if the device is empty.

        Does not check for a change: an engine that sleeps has unmapped its weights.
        """
        self._names.note_reset(device_is_empty=device_is_empty)
        if self._names.is_stopped and device_is_empty:
            self._begin()

    def close(self) -> None:
        """Stops watching. Idempotent."""
        self._calls.close()
        self._watch = None

    def _change(self, how: str) -> None:
        if self._names.is_stopped:
            return
        if self._names.can_begin():
            self._begin()
            return
        self._names.stop(begins_later=False)
        warn_once(
            f"vllm_tier.weights {how}", f"no chunk is loaded or stored until a {_RESET}: {how}"
        )

    def _begin(self) -> None:
        self._watch = None  # the next step's weights have the name
        self._renamed(self._names.begin())
