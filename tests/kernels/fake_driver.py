"""A device made of this process's memory, which writes down what it is given.

Work of a stream runs when something waits for it, or when the test says so, in any order that waits
allow: what was not ordered is seen in the wrong order sooner or later. With a shim library kernels
run, too; without one they are only written down.
"""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from shim_library import Region

from kvconnect.kernels.cuda.compile.sources import Kernel
from kvconnect.kernels.cuda.driver.interface import MAX_BATCH, AccessOrder, Descriptors, Memory

PINNED = torch.device("cpu")
DEVICE = torch.device("cuda", 0)


@dataclass(eq=False)
class FakeStream:
    """What comes behind what, and whether it is the legacy default, or captures."""

    name: str
    legacy: bool = False
    capturing: bool = False
    after: list = field(default_factory=list)


@dataclass(eq=False)
class Work:
    """A launch, a batch or an upload that a stream was given."""

    kind: str
    stream: FakeStream
    run: object
    behind: tuple
    early: object = None
    over: bool = False

    def finish(self):
        """Run it, and before it what it comes behind."""
        waiting = [self]
        while waiting:
            work = waiting[-1]
            if work.over:
                waiting.pop()
                continue
            left = [before for before in work.behind if not before.over]
            if left:
                waiting += left
                continue
            waiting.pop()
            work.over = True  # also if it fails: it is not run twice
            work.run()


class FakeEvent:
    """Behind some work."""

    def __init__(self, behind) -> None:
        self.behind = tuple(behind)

    def query(self) -> bool:
        return all(work.over for work in self.behind)

    def synchronize(self) -> None:
        for work in self.behind:
            work.finish()

    def wait(self, stream) -> None:
        stream.after += self.behind


@dataclass(frozen=True)
class Launched:
    kernel: Kernel
    ctas: int
    params: array
    stream: FakeStream


@dataclass(frozen=True)
class Batch:
    descriptors: Descriptors
    order: AccessOrder
    stream: FakeStream


class FakeDriver:
    """See `kvconnect.kernels.cuda.driver.interface.Driver`.

    Args:
        shim: runs kernels.
        everything: all memory counts as the device's, whatever its tensors say.
        lazy: work runs when it is waited for; else at once.
        seed: of the order in which `finish` runs things.
    """

    def __init__(self, shim=None, *, everything=False, lazy=False, seed=0) -> None:
        self.shim = shim
        self.everything = everything
        self.lazy = lazy
        self.random = Random(seed)
        self.launched: list[Launched] = []
        self.batches: list[Batch] = []
        self.works: list[Work] = []
        self.regions: list[Region] = []
        self.reports: list = []
        self.fail_batch: int | None = None
        self.multiprocessors = 2
        self.compute = FakeStream("compute")
        self.copy_streams = {kind: FakeStream(kind) for kind in ("load", "store")}
        self._errors = np.zeros(1, np.int64)
        self._keep: list = [self._errors]
        self.allow(self._errors.ctypes.data, 8, writable=True)

    # ------------------------------------------------------------------ for tests

    def allow(self, begin: int, nbytes: int, *, writable: bool) -> None:
        self.regions.append(Region(begin, nbytes, writable))

    def allow_tensor(self, tensor: torch.Tensor, *, writable: bool) -> None:
        """Kernels may touch the bytes that `tensor` spans, and nothing beyond."""
        if tensor.numel():
            last = sum(
                (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
            )
            nbytes = (last + 1) * tensor.element_size()
            self.allow(tensor.data_ptr(), nbytes, writable=writable)

    def finish(self) -> None:
        """Run all that is left, in a random order that waits allow."""
        while left := [work for work in self.works if not work.over]:
            ready = [work for work in left if all(before.over for before in work.behind)]
            self.random.choice(ready).finish()

    @property
    def kinds(self) -> list[str]:
        return [work.kind for work in self.works]

    # ------------------------------------------------------------------ Driver

    def on_device(self, device: torch.device) -> bool:
        return self.everything or device.type == "cuda"

    def current_stream(self) -> FakeStream:
        return self.compute

    def copy_stream(self, kind) -> FakeStream:
        return self.copy_streams[kind]

    def is_legacy_default(self, stream) -> bool:
        return stream.legacy

    def capturing(self, stream) -> bool:
        return stream.capturing

    def record(self, stream) -> FakeEvent:
        assert not stream.capturing, "an event of a graph says nothing outside of it"
        return FakeEvent(stream.after)

    def launch(self, kernel, ctas, params, stream) -> None:
        assert ctas >= 1
        kept = array("q", params)
        self.launched.append(Launched(kernel, ctas, kept, stream))

        def run():
            if self.shim is not None:
                self.reports.append(self.shim.launch(kernel, ctas, kept, self.regions))

        self._give("kernel", stream, run)

    def copy_batch(self, descriptors, order, stream) -> None:
        assert not stream.legacy, "the driver takes no batch on the legacy default stream"
        assert not stream.capturing, "a batch cannot be captured"
        assert 0 < len(descriptors) <= MAX_BATCH
        if self.fail_batch == len(self.batches):
            raise RuntimeError("planted")
        for numbers in (descriptors.sources, descriptors.targets, descriptors.sizes):
            assert numbers.dtype == np.int64
            assert numbers.flags.c_contiguous
        assert (descriptors.sizes > 0).all()
        self.batches.append(Batch(descriptors, order, stream))
        early = None
        if order is AccessOrder.ANY and self.random.random() < 0.5:
            early = [ctypes.string_at(s, n) for s, _, n in rows_of(descriptors)]

        def run():
            rows = rows_of(descriptors)
            self.random.shuffle(rows)
            read = early or [ctypes.string_at(s, n) for s, _, n in rows]
            for data, (_, target, size) in zip(
                read, rows_of(descriptors) if early else rows, strict=True
            ):
                ctypes.memmove(target, data, size)

        self._give("batch", stream, run)

    def upload(self, data, stream) -> Memory:
        assert not stream.capturing
        there = np.empty_like(np.ascontiguousarray(data))
        kept = data.copy()
        self._give("upload", stream, lambda: np.copyto(there, kept))
        return self._memory(there, writable=False)

    def constant(self, data) -> Memory:
        return self._memory(data.copy(), writable=False)

    def device_memory(self, nbytes) -> Memory:
        return self._memory(np.full(nbytes, 0xDB, np.uint8), writable=True)

    def host_memory(self, nbytes) -> Memory:
        return self._memory(np.full(nbytes, 0xDB, np.uint8), writable=True)

    @property
    def error_word(self) -> int:
        return self._errors.ctypes.data

    def take_errors(self) -> int:
        self.finish()
        count = int(self._errors[0])
        self._errors[0] = 0
        return count

    # ------------------------------------------------------------------

    def _memory(self, there, *, writable) -> Memory:
        self._keep.append(there)  # what is allowed below must not be given away again
        self.allow(there.ctypes.data, there.nbytes, writable=writable)
        return Memory(there.ctypes.data, there.nbytes, there)

    def _give(self, kind, stream, run) -> None:
        work = Work(kind, stream, run, tuple(stream.after))
        self.works.append(work)
        if stream.capturing:
            work.over = True  # it runs when the graph is replayed
            return
        stream.after = [work]
        if not self.lazy:
            work.finish()


def rows_of(descriptors):
    return list(
        zip(
            descriptors.sources.tolist(),
            descriptors.targets.tolist(),
            descriptors.sizes.tolist(),
            strict=True,
        )
    )
