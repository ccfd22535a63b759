"""The order of calls after the device's work so far; the engine does not wait for them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch


class DeviceOrder:
    """Runs calls after the work that is enqueued on the forward passes' stream, in order.

    On the CPU the work is done already, so a call runs at once on the caller's thread. On CUDA a
    thread of this object runs the call after an event that `after` records. `after` is called on
    the engine's thread only.

    Args:
        device: the device of the pools.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def after(self, call: Callable[[], object]) -> None:
        """Runs `call`, which must not raise, once the work enqueued so far is done."""
        if self._device.type != "cuda":
            call()
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="kvconnect-device-order", daemon=True
            )
            self._thread.start()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._queue.put((event, call))

    def close(self) -> None:
        """Ends the thread after the calls that are queued; blocks until then."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, call = item
            event.synchronize()
            call()
