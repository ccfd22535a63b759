"""The same on a CUDA device: all ways, graphs, streams, large pools.

Under the memory checker (kernels only; the driver's own copies are not looked into)::

    compute-sanitizer --tool memcheck python -m pytest -m gpu tests/kernels/test_gpu.py
    compute-sanitizer --tool racecheck python -m pytest -m gpu tests/kernels/test_gpu.py
    compute-sanitizer --tool initcheck python -m pytest -m gpu tests/kernels/test_gpu.py -k gather
"""

from __future__ import annotations

import threading

import pytest
import torch

from kvconnect.kernels.append import reshape_and_cache
from kvconnect.kernels.blocks.paged import PagedKv
from kvconnect.kernels.copy import copy_blocks, gather_blocks, scatter_blocks
from kvconnect.kernels.cuda import device
from kvconnect.kernels.cuda.copy_policy import CopyPolicy
from kvconnect.kernels.cuda.driver.streams import copy_streams
from kvconnect.kernels.host import reference
from kvconnect.kernels.policy import capabilities
from kvconnect.kernels.update import kv_cache_update

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="NO CUDA DEVICE: nothing of the kernels was run on one",
    ),
    pytest.mark.timeout(600),
]

CUDA = torch.device("cuda", 0)
NUM_BLOCKS = 64
POISON = 0xA5


def random_bytes(*sizes, where=CUDA):
    return torch.randint(0, 256, sizes, dtype=torch.uint8, device=where)


def random_kv(form, dtype=torch.bfloat16, *, tokens=16, heads=4, dim=64, layers=5):
    """A cache of random bytes on the device, in one of the forms of engines."""
    size = dtype.itemsize
    if form == "pool":
        pool = random_bytes(NUM_BLOCKS, layers, 2, tokens, heads, dim * size)
        return PagedKv.from_pool(pool.view(dtype))
    inner = (tokens, heads) if form == "NHD" else (heads, tokens)
    made = [random_bytes(2, NUM_BLOCKS, *inner, dim * size).view(dtype) for _ in range(layers)]
    return PagedKv.from_layers(made, layout=form)


def clones(kv):
    return [view.clone() for view in kv.views]


def same(one, other):
    left, right = (t.contiguous().view(-1).view(torch.uint8).cpu() for t in (one, other))
    return torch.equal(left, right)


def host_rows(count, nbytes, *, pinned=True):
    return torch.full((count, nbytes), POISON, dtype=torch.uint8, pin_memory=pinned)


FORMS = ["pool", "NHD", "HND"]
PATHS = ["auto", "kernel", "dma", "staged"]
SOME = [7, 0, -1, 33, 34, 63]


def test_this_machine_can_do_everything():
    found = capabilities()
    assert not found.missing
    assert found.batched_dma, f"driver for CUDA {found.driver}: copies go one by one"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dim", [64, 80, 96, 1, 5])
def test_gather_and_scatter_within_the_device(form, dim):
    kv = random_kv(form, dim=dim)
    out = random_bytes(len(SOME), kv.block_nbytes)
    expected = out.clone()
    reference.gather(kv.views, SOME, expected)
    gather_blocks(kv, SOME, out).wait()
    assert same(out, expected)
    scatter_blocks(out.flip(0).contiguous(), kv, SOME).wait()
    again = out.clone()
    gather_blocks(kv, SOME, again).wait()
    kept = [i for i, block in enumerate(SOME) if block >= 0]
    flipped = out.flip(0)
    assert all(same(again[i], flipped[i]) for i in kept)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("aside", [True, False])
def test_every_way_to_the_host_and_back(form, path, pinned, aside):
    if not pinned and path in {"kernel", "staged"}:
        pytest.skip("needs page-locked memory")
    kv = random_kv(form)
    stream = torch.cuda.Stream() if aside else None
    torch.cuda.synchronize()
    out = host_rows(len(SOME), kv.block_nbytes, pinned=pinned)
    expected = out.clone()
    reference.gather([view.cpu() for view in kv.views], SOME, expected)
    gather_blocks(kv, SOME, out, path=path, stream=stream).wait()
    assert torch.equal(out, expected)
    before = clones(kv)
    src = random_bytes(len(SOME), kv.block_nbytes, where="cpu")
    src = src.pin_memory() if pinned else src
    scatter_blocks(src, kv, SOME, path=path, stream=stream, stable_source=True).wait()
    reference.scatter(src.cuda(), before, SOME)
    assert all(map(same, kv.views, before))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [None, [0, 1, 15, 16]])
def test_copies_of_whole_blocks_and_of_first_tokens(form, tokens):
    kv = random_kv(form)
    pairs = [(0, 10), (1, 11), (60, 2), (33, 34)]
    expected = clones(kv)
    axis = 1 if form == "HND" else 0
    reference.copy(clones(kv), expected, pairs, tokens, token_axis=axis)
    copy_blocks(kv, kv, pairs, tokens).wait()
    assert all(map(same, kv.views, expected))


@pytest.mark.parametrize("count", [128, 129, 5000])
def test_many_ids_are_uploaded(count):
    pool = random_bytes(6000, 1, 2, 2, 1, 64)
    kv = PagedKv.from_pool(pool)
    ids = torch.randperm(6000)[:count]
    out = random_bytes(count, kv.block_nbytes)
    gather_blocks(kv, ids.tolist(), out).wait()
    assert same(out, pool[ids.cuda()])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_on_the_device_that_are_no_blocks_are_skipped_and_counted(dtype):
    kv = random_kv("pool")
    device.id_errors(CUDA)
    ids = torch.tensor([3, -1, NUM_BLOCKS, 5, -2], dtype=dtype, device=CUDA)
    out = torch.full((5, kv.block_nbytes), POISON, dtype=torch.uint8, device=CUDA)
    expected = out.clone()
    reference.gather(kv.views, [3, -1, -1, 5, -1], expected)
    gather_blocks(kv, ids, out).wait()
    assert same(out, expected)
    assert device.id_errors(CUDA) == 2
    assert device.id_errors(CUDA) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("packed", [False, True])
def test_kv_cache_update(dtype, packed):
    cache = random_bytes(5, 3, 40, 96 * dtype.itemsize).view(dtype)
    lengths = [4, 0, 7, 1, 40] if packed else [9] * 5
    starts = [36, 40, 2, 0, 0] if packed else [31, 0, 3, 17, 30]
    ends = [sum(lengths[:i]) for i in range(6)]
    sizes = (ends[-1], 3) if packed else (5, 3, 9)
    update = random_bytes(*sizes, 96 * dtype.itemsize).view(dtype)
    expected = cache.clone()
    indices = torch.tensor(starts, device=CUDA)
    if packed:
        reference.update_packed(expected, update, starts, ends)
        given = torch.tensor(ends, device=CUDA, dtype=torch.int32)
        kv_cache_update(cache, update, indices, given, update_form="packed_nhd")
    else:
        reference.update_padded(expected, update, starts)
        kv_cache_update(cache, update, indices)
    assert same(cache, expected)
    assert device.id_errors(CUDA) == 0


@pytest.mark.parametrize("form", FORMS)
def test_reshape_and_cache(form):
    kv = random_kv(form)
    slots = torch.randperm(NUM_BLOCKS * 16)[:100]
    slots[::7] = -1
    key, value = (random_bytes(100, 4, 128).view(torch.bfloat16) for _ in range(2))
    expected = clones(kv)
    for state, view in ((key, expected[4]), (value, expected[5])):
        reference.append(state, view.transpose(1, 2) if form == "HND" else view, slots.tolist())
    reshape_and_cache(key, value, kv, slots.cuda(), layer=2)
    assert all(map(same, kv.views, expected))


def test_pools_of_more_than_4_gib():
    free, _ = torch.cuda.mem_get_info(CUDA)
    if free < 12 << 30:
        pytest.skip("less than 12 GiB of the device are free")
    pool = torch.zeros(160_000, 1, 2, 16, 1, 1024, dtype=torch.uint8, device=CUDA)  # 5 GiB
    kv = PagedKv.from_pool(pool)
    ids = [159_999, 0, 131_071, 131_072, 65_536]
    src = random_bytes(len(ids), kv.block_nbytes)
    out = torch.empty_like(src)
    scatter_blocks(src, kv, ids).wait()
    gather_blocks(kv, ids, out).wait()
    assert same(out, src)
    assert same(pool[ids], src)
    assert int(pool.count_nonzero()) == int(src.count_nonzero()), "nothing else was written"


# ---------------------------------------------------------------------------- graphs and streams


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("ids_on_device", [True, False])
def test_a_captured_gather_and_scatter_is_replayed(warm, ids_on_device):
    kv = random_kv("HND")
    ids = list(range(0, 60, 2))
    given = torch.tensor(ids, device=CUDA) if ids_on_device else ids
    rows = torch.zeros(len(ids), kv.block_nbytes, dtype=torch.uint8, device=CUDA)
    other = random_kv("HND")
    if warm:
        gather_blocks(kv, given, rows, path="kernel").wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_blocks(kv, given, rows)
        scatter_blocks(rows, other, given)
    for _ in range(3):
        for view in kv.views:
            view.copy_(random_bytes(*view.shape[:-1], view.shape[-1] * 2).view(torch.bfloat16))
        graph.replay()
        torch.cuda.synchronize()
        for mine, theirs in zip(other.views, kv.views, strict=True):
            assert same(mine[ids], theirs[ids])


def test_more_ids_than_a_launch_takes_are_captured_by_value():
    pool = random_bytes(1000, 1, 2, 2, 1, 64)
    kv = PagedKv.from_pool(pool)
    ids = torch.randperm(1000)[:700].tolist()
    out = torch.zeros(700, kv.block_nbytes, dtype=torch.uint8, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gather_blocks(kv, ids, out)
    graph.replay()
    torch.cuda.synchronize()
    assert same(out, pool[ids])


@pytest.mark.parametrize("path", ["dma", "staged"])
def test_dma_is_refused_while_a_graph_is_captured(path):
    kv = random_kv("pool")
    out = host_rows(1, kv.block_nbytes)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side), pytest.raises(RuntimeError, match="graph"):
        gather_blocks(kv, [0], out, path=path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("default", [True, False])
def test_stores_come_behind_what_the_model_wrote_and_before_it_writes_again(path, default):
    kv = random_kv("NHD")
    model = torch.cuda.default_stream() if default else torch.cuda.Stream()
    outs = [host_rows(NUM_BLOCKS, kv.block_nbytes) for _ in range(4)]
    weight = torch.randn(4096, 4096, device=CUDA)
    torch.cuda.synchronize()
    transfers = []
    with torch.cuda.stream(model):
        for step, out in enumerate(outs):
            weight = weight @ weight / 64  # keeps the stream busy while the copy is ordered
            for view in kv.views:
                view.fill_(step + 1)
            transfers.append(gather_blocks(kv, range(NUM_BLOCKS), out, path=path))
        for view in kv.views:
            view.fill_(99)
    for step, (out, transfer) in enumerate(zip(outs, transfers, strict=True)):
        transfer.wait()
        assert (out.view(torch.bfloat16) == step + 1).all(), step


def test_two_streams_take_turns_with_the_same_buffers():
    driver = device.device_work(CUDA).driver
    with device.driven_by(driver, CopyPolicy(slot_nbytes=1 << 20, num_slots=2)):
        pair = copy_streams(CUDA)
        kvs = [random_kv("NHD") for _ in range(8)]
        outs = [host_rows(NUM_BLOCKS, kv.block_nbytes) for kv in kvs]
        torch.cuda.synchronize()
        streams = [pair.load, pair.store] * 4
        for kv, out, stream in zip(kvs, outs, streams, strict=True):
            gather_blocks(kv, range(NUM_BLOCKS), out, path="staged", stream=stream)
        torch.cuda.synchronize()
    for kv, out in zip(kvs, outs, strict=True):
        expected = torch.empty_like(out)
        reference.gather([view.cpu() for view in kv.views], range(NUM_BLOCKS), expected)
        assert torch.equal(out, expected)


def test_a_thread_without_a_context_copies_too():
    kv = random_kv("pool")
    out = host_rows(2, kv.block_nbytes)
    found = []

    def run():
        found.append([gather_blocks(kv, [1, 2], out, path=path).wait() for path in PATHS])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found
    expected = torch.empty_like(out)
    reference.gather([view.cpu() for view in kv.views], [1, 2], expected)
    assert torch.equal(out, expected)


def test_memory_of_transfers_that_nobody_keeps_is_not_reused_too_early():
    kv = random_kv("pool")
    before = clones(kv)
    weight = torch.randn(8192, 8192, device=CUDA)
    for _ in range(20):
        weight = weight @ weight / 90
        src = random_bytes(NUM_BLOCKS, kv.block_nbytes)
        expected = src.clone()
        scatter_blocks(src, kv, range(NUM_BLOCKS))
        del src
        random_bytes(NUM_BLOCKS, kv.block_nbytes).fill_(0xEE)  # takes memory that is free
        reference.scatter(expected, before, range(NUM_BLOCKS))
    torch.cuda.synchronize()
    assert all(map(same, kv.views, before))
