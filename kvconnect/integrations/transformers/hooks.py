"""The hooks into a model's forward pass that report its tokens and seconds."""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections import deque
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

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


# The code in which torch runs a module's hooks and `forward`.
_CALL = nn.Module._call_impl.__code__  # noqa: SLF001  no name of it is public
_CUT = ("input_ids", "position_ids", "cache_position")


class PassHooks:
    """Reports forward passes of a model to its live caches, until `remove`.

    Args:
        model: is hooked as a whole; passes of its parts are not seen.
        live: its caches.
        times: measures the passes.
    """

    def __init__(
        self, model: nn.Module, live: weakref.WeakSet[StoredCache], times: PassTimes
    ) -> None:
        self._model = model
        self._live = live
        self._times = times
        self._names = tuple(inspect.signature(model.forward).parameters)  # for positional arguments
        self._handles = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        )

    @property
    def in_pass(self) -> bool:
        """Returns whether a forward pass of the model is under way on this thread.

        Inspects the stack, since no hook runs at the end of an interrupted pass.
        """
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code is _CALL and frame.f_locals.get("self") is self._model:
                return True
            frame = frame.f_back
        return False

    def remove(self) -> None:
        """Removes the hooks, so that passes are no longer reported."""
        for handle in self._handles:
            handle.remove()

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = self._by_name(args, named)
        cache = given.get("past_key_values")
        if not isinstance(cache, StoredCache) or cache not in self._live:
            return args, named
        repeated = cache.num_repeated(given.get("input_ids"))
        if repeated:
            cut = {one: given[one][..., repeated:] for one in _CUT if given.get(one) is not None}
            args, named = (), given | cut
            given = named
        cache.forward_begins(given)
        if (ids := given.get("input_ids")) is not None:
            self._times.begin(cache, ids.shape[0], ids.shape[1])
        return args, named

    def _after(
        self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: object
    ) -> None:
        cache = self._by_name(args, named).get("past_key_values")
        if isinstance(cache, StoredCache) and cache in self._live:
            cache.forward_ended(succeeded=output is not None)
            self._times.end(cache, succeeded=output is not None)

    def _by_name(self, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self._names, args, strict=False)) | named
