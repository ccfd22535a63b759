"""What waits for what when copies run on streams of their own, shown without a GPU.

`FakeDevice` keeps what each stream is given. It knows of every piece of work what must be over
before it starts, and it can run the streams in any order that their waits allow.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import permutations
from random import Random

import pytest
import torch
from copy_orders import give, some_order
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnect.cache.memory.copier import TensorCopier
from kvconnect.cache.memory.copy_streams import CopyStreams, CudaStreams
from kvconnect.cache.memory.pool_tensor import allocate_arena, allocate_host_pool, pool_view
from kvconnect.layout import KvCacheLayout

CPU = torch.device("cpu")
T = 4
LAYOUT = KvCacheLayout(2, 1, 3, 3, T, torch.bfloat16)
SMALL = KvCacheLayout(2, 1, 2, 2, T, torch.bfloat16, window=8)


@dataclass(eq=False)
class FakeStream:
    """What a stream was given and has not run yet, and what all of that waited for."""

    kind: str
    priority: int = 0
    queue: list = field(default_factory=list)
    behind: set = field(default_factory=set)


@dataclass(eq=False)
class FakeEvent:
    kind: str
    behind: frozenset
    over: bool = False


@dataclass(eq=False)
class Work:
    run: object
    stream: FakeStream
    behind: frozenset

    def __repr__(self):
        return f"{self.stream.kind} work"


class FakeDevice:
    """Stands for `CudaStreams` and writes down what it is given.

    `dropped` names waits that are left out, as (kind of the waiting stream, kind of the stream that
    the event is of): a planted fault.
    """

    def __init__(self, dropped=()):
        self.dropped = dropped
        self.copy_streams = []
        self.current = FakeStream("compute")
        self.streams = [self.current]
        self.launched = []

    def new_stream(self, priority):
        stream = FakeStream(("load", "store")[len(self.copy_streams)], priority)
        self.copy_streams.append(stream)
        self.streams.append(stream)
        return stream

    def switch_stream(self):
        self.current = FakeStream("compute")
        self.streams.append(self.current)

    def current_stream(self):
        return self.current

    def record(self, stream):
        event = FakeEvent(stream.kind, frozenset(stream.behind))
        stream.queue.append(("record", event))
        return event

    def wait(self, stream, event):
        if (stream.kind, event.kind) not in self.dropped:
            stream.queue.append(("wait", event))
            stream.behind |= event.behind

    def launch(self, stream, work):
        launched = Work(work, stream, frozenset(stream.behind))
        stream.queue.append(("run", launched))
        stream.behind.add(launched)
        self.launched.append(launched)

    def compute(self, work=lambda: None):
        """Give the current stream work, as a forward pass does."""
        self.launch(self.current, work)
        return self.launched[-1]

    def run_all(self, random):
        """Run everything, the next stream chosen anew each time or by a fixed rank."""
        ranks = {id(stream): random.random() for stream in self.streams}
        fickle = random.random() < 0.5
        while ready := [stream for stream in self.streams if self._can_go_on(stream)]:
            stream = random.choice(ready) if fickle else min(ready, key=lambda s: ranks[id(s)])
            kind, what = stream.queue.pop(0)
            if kind == "run":
                what.run()
            elif kind == "record":
                what.over = True
        assert not any(stream.queue for stream in self.streams), "streams wait for each other"

    def _can_go_on(self, stream):
        return bool(stream.queue) and (stream.queue[0][0] != "wait" or stream.queue[0][1].over)


def random_bytes(tensor, random):
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    size = (tensor.nbytes,)
    values = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
    return values.view(tensor.dtype).view(tensor.shape).to(tensor.device)


class Memory:
    """Two groups in one arena, of blocks of 96 and 64 bytes, and their host tiers."""

    layouts = (LAYOUT, SMALL)
    num_blocks = (4, 6)
    num_host_blocks = 3

    def __init__(self, device=CPU):
        self.arena = allocate_arena(4 * LAYOUT.block_nbytes, device)
        self.pools = [pool_view(self.arena, layout) for layout in self.layouts]
        self.host_pools = [
            allocate_host_pool(layout, self.num_host_blocks, device) for layout in self.layouts
        ]

    def copier(self, streams=None):
        return TensorCopier(self.pools, self.host_pools, self.layouts, streams=streams)


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def copier(device):
    """Of two groups with memory of their own: four primary and four secondary blocks each."""
    memory = [allocate_host_pool(layout, 4, CPU) for layout in (LAYOUT, SMALL)]
    tiers = [allocate_host_pool(layout, 4, CPU) for layout in (LAYOUT, SMALL)]
    return TensorCopier(memory, tiers, [LAYOUT, SMALL], streams=CopyStreams(device))


# ------------------------------------------------------------------ copies and the compute stream

ORDERS = {
    "onboard": lambda copier: copier.onboard(0, [2], [1]),
    "offload": lambda copier: copier.offload(0, [1], [2]),
    "copy_tokens": lambda copier: copier.copy_tokens(0, 0, 1, 3),
    "copy_tokens from the host": lambda copier: copier.copy_tokens(0, 2, 1, 3, from_host=True),
    "move": lambda copier: copier.move(0, [0], [1]),
}
each_order = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


@each_order
def test_copies_do_not_run_on_the_compute_stream(device, copier, order):
    order(copier)
    assert device.launched[0].stream in device.copy_streams


def test_loads_go_before_stores(device, copier):
    load, store = device.copy_streams
    assert load.priority < store.priority
    copier.onboard(0, [2], [1])
    copier.offload(0, [1], [2])
    assert [work.stream for work in device.launched] == [load, store]


@each_order
def test_another_compute_stream_does_not_lose_the_order(device, copier, order):
    copier.onboard(0, [2], [1])
    copier.offload(0, [1], [3])
    device.switch_stream()
    order(copier)
    first, second, copy = device.launched
    assert {first, second} <= copy.behind
    assert {first, second, copy} <= device.compute().behind


def test_a_batch_without_orders_leaves_the_streams_alone(device, copier):
    with copier.together():
        pass
    assert not any(stream.queue for stream in device.streams)


# ------------------------------------------------------------------ copies of one batch


IN_CONFLICT = [
    *(("offload 1 2", f"{name} 3 1") for name in ("onboard", "copy", "host_copy", "move")),
    *((f"{name} 3 1", "offload 1 2") for name in ("onboard", "copy", "move")),
    *(("offload 1 2", f"{name} 2 3") for name in ("onboard", "host_copy")),
    *((f"{name} 2 3", "offload 1 2") for name in ("onboard", "host_copy")),
]
"""Two orders, each with its source and its target, that use one block of the device or host."""


def order_of(text):
    name, source, target = text.split()
    if name.endswith("copy"):
        tokens = (0, int(source), int(target), 2)
        return "copy_tokens", tokens, {"from_host": name == "host_copy"}
    return name, (0, [int(source)], [int(target)]), {}


@pytest.mark.parametrize(("first", "then"), IN_CONFLICT)
def test_orders_of_a_batch_that_share_a_slot_keep_their_order(device, copier, first, then):
    with copier.together():
        give(order_of(first), copier)
        give(order_of(then), copier)
    earlier, later = device.launched
    assert earlier in later.behind


def test_loads_and_stores_of_different_slots_overlap(device, copier):
    with copier.together():
        copier.offload(0, [0, 1], [2, 3])
        copier.onboard(0, [0, 1], [2, 3])
        copier.offload(1, [0], [1])
    first, load, last = device.launched
    assert first not in load.behind
    assert load not in last.behind


def test_batches_nest(device, copier):
    with copier.together():
        with copier.together():
            copier.offload(0, [0], [2])
        copier.onboard(0, [0], [2])
    store, load = device.launched
    assert store not in load.behind


def test_slots_of_an_arena_are_its_bytes():
    device, memory = FakeDevice(), Memory()
    copier = memory.copier(CopyStreams(device))
    with copier.together():
        copier.offload(0, [3], [0])  # bytes 288..383
        copier.onboard(1, [1], [0])  # bytes 0..63
        copier.onboard(1, [0], [5])  # bytes 320..383
    store, apart, same = device.launched
    assert store not in apart.behind
    assert store in same.behind


def test_a_copy_that_fails_half_way_is_waited_for_all_the_same(device, copier):
    class Broken(FakeDevice):
        def launch(self, stream, work):
            super().launch(stream, work)
            raise RuntimeError("the device fell off the bus")

    device.__class__ = Broken
    with pytest.raises(RuntimeError, match="fell off"):
        copier.onboard(0, [0], [1])
    device.__class__ = FakeDevice
    assert device.launched[0] in device.compute().behind


# ------------------------------------------------------------------ any program


class Program:
    """Random orders and forward passes, given to a copier with streams and to one without."""

    def __init__(self, random, actual, streams, compute):
        self.random = random
        self.expected = Memory()
        self.actual = actual
        for mine, other in zip(self._memory(self.expected), self._memory(actual), strict=True):
            mine.copy_(random_bytes(mine, random))
            other.copy_(mine)
        self.copiers = [self.expected.copier(), actual.copier(streams)]
        self.compute = compute
        self.seen = ([], [])

    def give(self, num_steps):
        """Batches of orders, sometimes of one, with a forward pass after some of them."""
        for _ in range(num_steps):
            with ExitStack() as batch:
                if self.random.random() < 0.6:
                    for copier in self.copiers:
                        batch.enter_context(copier.together())
                    for _ in range(self.random.randint(1, 5)):
                        self._order()
                else:
                    self._order()
            if self.random.random() < 0.5:
                self._forward()

    def agrees(self):
        """Whether the memory is as without streams, and every forward pass read the same."""
        pairs = zip(self._memory(self.expected), self._memory(self.actual), strict=True)
        same = all(torch.equal(mine, other.cpu()) for mine, other in pairs)
        reads = zip(*self.seen, strict=True)
        return same and all(torch.equal(mine, other.cpu()) for mine, other in reads)

    def _order(self):
        group = self.random.randrange(2)
        sizes = Memory.num_blocks[group], Memory.num_host_blocks
        give(some_order(self.random, group, *sizes, T - 1), *self.copiers)

    def _forward(self):
        group = self.random.randrange(2)
        block = self.random.randrange(Memory.num_blocks[group])
        values = random_bytes(self.expected.pools[group][block], self.random)

        def forward(memory, seen):
            seen.append(memory.arena.clone())
            memory.pools[group][block] = values.to(memory.arena.device)

        forward(self.expected, self.seen[0])
        self.compute(lambda: forward(self.actual, self.seen[1]))

    @staticmethod
    def _memory(memory):
        return [memory.arena, *(pool.view(torch.uint8) for pool in memory.host_pools)]


def agrees_in_any_order(random, dropped=()):
    device = FakeDevice(dropped)
    program = Program(random, Memory(), CopyStreams(device), device.compute)
    program.give(8)
    device.run_all(random)
    return program.agrees()


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
def test_streams_in_any_order_do_what_one_after_the_other_does(random):
    assert agrees_in_any_order(random)


@pytest.mark.parametrize(
    ("waiting", "awaited"), list(permutations(["compute", "load", "store"], 2))
)
def test_no_wait_can_be_left_out(waiting, awaited):
    dropped = {(waiting, awaited)}
    assert not all(agrees_in_any_order(Random(seed), dropped) for seed in range(200))


class SlowCudaStreams(CudaStreams):
    """Every copy starts late, so that a missing wait shows."""

    def launch(self, stream, work):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000)
        super().launch(stream, work)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("own_stream", [False, True], ids=["default", "own"])
def test_a_device_does_what_one_after_the_other_does(own_stream):
    device = torch.device("cuda")

    def slowly(work):
        torch.cuda._sleep(100_000)
        work()

    with torch.cuda.stream(torch.cuda.Stream()) if own_stream else nullcontext():
        for seed in range(30):
            streams = CopyStreams(SlowCudaStreams(device))
            program = Program(Random(seed), Memory(device), streams, slowly)
            program.give(20)
            torch.cuda.synchronize()
            assert program.agrees(), f"seed {seed}"
