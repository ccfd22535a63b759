"""What a connector takes out of a pool in host memory is a copy, as it is from a device."""

from __future__ import annotations

import io

import pytest
import recording
import torch
from bench_engine import BenchEngine, llm_args

from kvconnect.connector.pool_view import PoolView, pool_view


@pytest.fixture
def pool() -> torch.Tensor:
    return torch.arange(6 * 2 * 2 * 8, dtype=torch.float32).reshape(6, 2, 2, 8)


TO_HOST = [
    lambda block: block.cpu(),
    lambda block: block.to("cpu"),
    lambda block: block.to("cpu", non_blocking=True),
    lambda block: block.to(torch.device("cpu"), torch.float32),
]


@pytest.mark.parametrize("to_host", TO_HOST)
def test_a_block_on_the_host_stays_as_it_was(pool, to_host):
    view = pool_view(pool)
    for block in (view[1], view[1, 0], view.select(0, 1), view.unbind(0)[1], view.view(6, -1)[1]):
        taken, before = to_host(block), block.clone()
        assert type(taken) is torch.Tensor
        view[1] += 1
        assert torch.equal(taken, before)


def test_only_the_block_is_saved(pool):
    file = io.BytesIO()
    torch.save(pool_view(pool)[1].cpu(), file)
    small = file.tell()
    file = io.BytesIO()
    torch.save(pool[1].clone(), file)
    assert small == file.tell()
    file.seek(0)
    assert torch.equal(torch.load(file), pool[1])


def test_writes_reach_the_pool(pool):
    view = pool_view(pool)
    view[2].copy_(torch.ones(2, 2, 8), non_blocking=True)
    view[3, 1] = 7
    view[[4, 5]] = 9
    view.view(6, 2, -1)[0].zero_()
    assert pool[2].eq(1).all()
    assert pool[3, 1].eq(7).all()
    assert pool[4:].eq(9).all()
    assert pool[0].eq(0).all()


def test_what_is_computed_from_it_is_a_plain_tensor(pool):
    view = pool_view(pool)
    made = [view + 1, view[1].clone(), view[[1, 2]], view.double(), torch.stack([view[1], view[2]])]
    assert {type(one) for one in made} == {torch.Tensor}
    assert isinstance(view[1], PoolView)
    assert view.shape == pool.shape
    assert view.data_ptr() == pool.data_ptr()
    assert view.is_contiguous()


def test_a_connector_is_given_such_a_pool():
    script = recording.fresh_script()
    with BenchEngine(llm_args(recording.config())) as bench:
        bench.answer([1, 2, 3, 4, 5], max_tokens=1)
        taken = script.worker.pool[0].cpu()
        bench.kv.pool[0] = 1
        assert not torch.equal(taken, bench.kv.pool[0])
        assert script.worker.pool.data_ptr() == bench.kv.pool.data_ptr()
