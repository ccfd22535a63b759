"""The canary: what it finds, what it leaves alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from kvconnect.digest.canary import Canary

CPU = torch.device("cpu")


def watched(module: nn.Module) -> Canary:
    given = torch.linspace(-1, 1, 8)
    return Canary(lambda: [module(given), module.weight], CPU)


def test_an_unchanged_computation_agrees_and_a_changed_one_does_not():
    module = nn.Linear(8, 8)
    canary = watched(module)
    assert canary.stable
    assert canary.agrees()
    module.bias.data[0] += 1e-6  # which no counter shows
    assert not canary.agrees()


def test_results_are_compared_by_shape_of_dtypes_and_bits():
    results = [torch.tensor([float("nan"), 0.0]), torch.tensor([1])]
    canary = Canary(lambda: results, CPU)
    assert canary.agrees()
    results[0] = torch.tensor([float("nan"), -0.0])
    assert not canary.agrees()
    del results[0]
    assert not canary.agrees()


def test_dropout_is_never_stable_and_random_numbers_are_given_back():
    module = nn.Dropout(0.5)
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    canary = Canary(lambda: [module(torch.ones(64))], CPU)
    assert not canary.stable
    assert not canary.agrees()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_first_run_may_be_the_odd_one():
    runs: list[int] = []

    def run() -> Sequence[Tensor]:
        runs.append(0)
        return [torch.tensor(float(len(runs) == 1))]

    canary = Canary(run, CPU)
    assert canary.stable
    assert canary.agrees()
    assert len(runs) == 4


def test_gradients_are_not_recorded():
    module = nn.Linear(8, 8)
    grads: list[bool] = []
    module.register_forward_hook(lambda *_: grads.append(torch.is_grad_enabled()))
    assert watched(module).agrees()
    assert not any(grads)


@pytest.mark.parametrize("drawn", [True, False])
def test_random_numbers_that_a_later_run_draws_are_given_back(drawn):
    draw = [False]

    def run() -> Sequence[Tensor]:
        return [torch.rand(1) * 0 if draw[0] else torch.zeros(1)]

    canary = Canary(run, CPU)
    draw[0] = drawn
    before = torch.random.get_rng_state()
    assert canary.agrees()
    assert torch.equal(torch.random.get_rng_state(), before)
