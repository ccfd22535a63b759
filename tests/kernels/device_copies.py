"""Copies between a device made of host memory and host memory, as the routes get them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from caches import POISON, random_bytes
from fake_driver import DEVICE, PINNED
from hypothesis import strategies as st

from kvconnect.kernels.blocks.runs import RunTable
from kvconnect.kernels.blocks.strips import Side, Strip
from kvconnect.kernels.blocks.work import BlockCopy, End
from kvconnect.kernels.cuda.copy_policy import Direction


def with_ids(copy: BlockCopy, source_ids, target_ids) -> BlockCopy:
    """The same copy of other pairs."""
    source, target = copy.source._replace(ids=source_ids), copy.target._replace(ids=target_ids)
    return replace(copy, source=source, target=target)


@dataclass(frozen=True)
class Runs:
    """The runs of a block: bytes of each, and of a token; whether the host has them in reverse."""

    sizes: tuple[int, ...]
    token_nbytes: int = 0
    reverse: bool = False
    gap: int = 0


class HostCopy:
    """A copy between device blocks of separate planes and host blocks in one piece.

    Each run of a block is in a plane of its own on the device. `host` and `planes` are the memory,
    `expected` what the target must hold afterwards.
    """

    def __init__(
        self, runs: Runs, pairs, direction, *, tokens=None, pinned=True, stable=False, seed=0
    ):
        self.runs = runs
        self.direction = direction
        device_ids = [old for old, _ in pairs]
        host_ids = [new for _, new in pairs]
        num_device, num_host = max(device_ids, default=0) + 2, max(host_ids, default=0) + 2
        pitch = sum(runs.sizes) + runs.gap
        loads = direction is Direction.LOAD
        self.planes = [
            self._fill(num_device * size, seed + 10 + i, poison=loads)
            for i, size in enumerate(runs.sizes)
        ]
        self.host = self._fill(num_host * pitch, seed + 99, poison=not loads)
        self.offsets = self._host_offsets()
        strips = []
        for plane, size, offset in zip(self.planes, runs.sizes, self.offsets, strict=True):
            base = plane.data_ptr() - self.planes[0].data_ptr()
            on_device, on_host = Side(base, 0, size), Side(offset, 0, pitch)
            source, target = (on_host, on_device) if loads else (on_device, on_host)
            strips.append(Strip(source, target, 1, size, runs.token_nbytes or size))
        first = self.planes[0].data_ptr()
        ends = (self.host.data_ptr(), first) if loads else (first, self.host.data_ptr())
        ids = (host_ids, device_ids) if loads else (device_ids, host_ids)
        devices = (PINNED, DEVICE) if loads else (DEVICE, PINNED)
        self.pitch = pitch
        self.pairs, self.tokens = pairs, tokens
        self.copy = BlockCopy(
            table=RunTable(strips),
            source=End(ends[0], np.array(ids[0], np.int64), 1 << 20, devices[0], pinned and loads),
            target=End(
                ends[1], np.array(ids[1], np.int64), 1 << 20, devices[1], pinned and not loads
            ),
            num_tokens=None if tokens is None else np.array(tokens, np.int64),
            nbytes=sum(runs.sizes) * len(pairs),
            stable_source=stable,
            keep=(self.planes, self.host),
        )

    @staticmethod
    def _fill(nbytes, seed, *, poison):
        return (
            torch.full((nbytes,), POISON, dtype=torch.uint8)
            if poison
            else random_bytes(nbytes, seed)
        )

    def _host_offsets(self):
        sizes = self.runs.sizes
        order = list(range(len(sizes)))
        if self.runs.reverse:
            order.reverse()
        offsets, at = [0] * len(sizes), 0
        for i in order:
            offsets[i] = at
            at += sizes[i]
        return offsets

    def expected(self):
        """The target's memories, of what the sources hold now."""
        loads = self.direction is Direction.LOAD
        targets = [plane.clone() for plane in self.planes] if loads else [self.host.clone()]
        for number, (on_device, on_host) in enumerate(self.pairs):
            for i, (size, offset) in enumerate(zip(self.runs.sizes, self.offsets, strict=True)):
                count = size
                if self.tokens is not None:
                    count = min(size, self.tokens[number] * self.runs.token_nbytes)
                there = slice(on_device * size, on_device * size + count)
                here = slice(on_host * self.pitch + offset, on_host * self.pitch + offset + count)
                if loads:
                    targets[i][there] = self.host[here]
                else:
                    targets[0][here] = self.planes[i][there]
        return targets

    def targets(self):
        return self.planes if self.direction is Direction.LOAD else [self.host]

    def is_as(self, expected):
        return all(map(torch.equal, self.targets(), expected))

    def allow_on(self, driver):
        for plane in self.planes:
            driver.allow_tensor(plane, writable=self.direction is Direction.LOAD)
        driver.allow_tensor(self.host, writable=self.direction is Direction.STORE)


def plane_runs():
    """Of a few planes; whole tokens of 8 bytes."""
    tokens = st.sampled_from([1, 2, 5, 16])
    return st.builds(
        lambda counts, reverse, gap: Runs(tuple(8 * n for n in counts), 8, reverse, gap),
        st.lists(tokens, min_size=1, max_size=4),
        st.booleans(),
        st.sampled_from([0, 0, 8, 24]),
    )


@st.composite
def host_copies(draw, *, directions=(Direction.LOAD, Direction.STORE), pinned=True):
    runs = draw(plane_runs())
    count = draw(st.integers(1, 8))
    blocks = st.lists(st.integers(0, 11), min_size=count, max_size=count, unique=True)
    pairs = list(zip(draw(blocks), draw(blocks), strict=True))
    if draw(st.booleans()):
        pairs.sort()
    prefixes = st.lists(st.integers(0, 16), min_size=count, max_size=count)
    tokens = draw(st.none() | prefixes)
    direction = draw(st.sampled_from(directions))
    return HostCopy(runs, pairs, direction, tokens=tokens, pinned=pinned)
