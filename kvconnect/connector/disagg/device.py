"""What is to happen once the device's work so far is done; nothing waits for it meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

__all__ = ["DeviceOrder"]


class DeviceOrder:
    """Calls things behind the work of the forward passes' stream, in order.

    On the CPU at once, on the thread that asks: the work is done. On CUDA on a thread of its own,
    which waits for an event recorded when it was asked for. Asked on the engine's thread only.

    Args:
        device: of the pools.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queue: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def after(self, call: Callable[[], object]) -> None:
        """Have `call`, which must not raise, called once what was enqueued so far is done."""
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
        """End the thread behind what was asked for; blocks until then."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            event, call = item
            event.synchronize()
            call()
