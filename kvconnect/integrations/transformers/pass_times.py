"""The seconds of a model's forward passes."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import NamedTuple, TypeAlias

import torch

from kvconnect.integrations.core.load_choice import LoadChoice
from kvconnect.integrations.transformers.stored_cache import StoredCache

# The most passes that the device has not finished; beyond it the oldest are dropped.
_MOST = 64

_Mark: TypeAlias = float | torch.cuda.Event


class _Pass(NamedTuple):
    tokens: int
    tokens_times_context: float
    started: _Mark


class PassTimes:
    """Reports passes on a CPU or a CUDA device to `choice`. Never waits for the device.

    Thread-safe. A cache has one pass at a time.

    Args:
        choice: receives the passes.
        device: the device of the model.
    """

    def __init__(self, choice: LoadChoice, device: torch.device) -> None:
        self._choice = choice
        self._device = device
        self._lock = threading.Lock()
        self._running: weakref.WeakKeyDictionary[StoredCache, _Pass] = weakref.WeakKeyDictionary()
        self._ended: deque[tuple[_Pass, _Mark]] = deque(maxlen=_MOST)

    def begin(self, cache: StoredCache, num_rows: int, num_tokens: int) -> None:
        """Records that a pass over `num_tokens` of each of `num_rows` begins."""
        if self._device.type not in {"cpu", "cuda"}:
            return
        tokens = num_rows * num_tokens
        context = tokens * (cache.get_seq_length() + num_tokens / 2)
        with self._lock:
            self._running[cache] = _Pass(tokens, context, self._now())

    def end(self, cache: StoredCache, *, succeeded: bool) -> None:
        """Records the end of the pass on the host; reports passes that ended on the device."""
        with self._lock:
            begun = self._running.pop(cache, None)
            if begun is None or not succeeded:
                return
            self._ended.append((begun, self._now()))
            while self._ended:
                begun, ended = self._ended[0]
                seconds = _seconds(begun.started, ended)
                if seconds is None:
                    break
                self._choice.record_step(begun.tokens, begun.tokens_times_context, seconds)
                self._ended.popleft()

    def _now(self) -> _Mark:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def _seconds(started: _Mark, ended: _Mark) -> float | None:
    """Returns the seconds between two marks; ``None``: the device has not passed the second."""
    if isinstance(started, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
        is_done: bool = ended.query()  # type: ignore[no-untyped-call]
        return started.elapsed_time(ended) / 1e3 if is_done else None
    if isinstance(started, float) and isinstance(ended, float):
        return ended - started
    return None
