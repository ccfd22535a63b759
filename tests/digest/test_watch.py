"""Weights that change in memory: replaced, written to, also past PyTorch's version counter."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from kvconnect.digest.watch import WeightWatch


def model():
    made = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Sequential(nn.Linear(64, 8)))
    made.register_buffer("frequencies", torch.arange(16.0), persistent=False)
    return made


def replace_weight(made):
    made[0].weight = nn.Parameter(made[0].weight.detach().clone())


def replace_module(made):
    made[2][0] = nn.Linear(64, 8)


def give_other_memory(made):
    made[0].weight.data = made[0].weight.data.clone()


@torch.no_grad()
def write(made):
    made[1].bias.add_(1)


def write_uncounted(made):
    made[2][0].weight.data.mul_(2)


def write_buffer(made):
    made.frequencies.mul_(2)


def add(made):
    made[0].register_parameter("more", nn.Parameter(torch.zeros(1)))


CHANGES = {
    "0.weight was replaced": replace_weight,
    "2.0.weight was replaced": replace_module,
    "0.weight got other memory": give_other_memory,
    "1.bias was written to": write,
    "2.0.weight was written to past PyTorch's version counter": write_uncounted,
    "frequencies was written to": write_buffer,
    "0.more was added": add,
}


@pytest.mark.parametrize("said", CHANGES)
def test_a_change_is_found_and_stays(said):
    made = model()
    watch = WeightWatch.of(made)
    assert [watch.changed() for _ in range(20)] == [None] * 20
    CHANGES[said](made)
    found = [watch.changed() for _ in range(8)]
    assert found[-1] == said
    if "added" not in said and "module" not in CHANGES[said].__name__:
        assert found == [said] * 8


def test_what_is_replaced_but_lives_on_is_found_within_eight_calls():
    made = model()
    kept = [*made.modules(), *made.parameters()]
    for replace in (replace_weight, replace_module):
        watch = WeightWatch.of(made)
        replace(made)
        assert any(watch.changed() for _ in range(8)), replace
    assert kept


def test_using_a_model_changes_nothing():
    made = model()
    watch = WeightWatch.of(made)
    made(torch.randn(3, 64)).sum().backward()
    with torch.inference_mode():
        made(torch.randn(3, 64))
    made.eval()
    assert watch.changed() is None


def test_a_line_of_each_tensor_is_compared_at_one_of_sixteen_offsets_in_turn():
    weight = torch.zeros(16 * 1024)
    watch = WeightWatch([("weight", weight)])
    weight.data[-1] = 1.0
    calls = [watch.changed() for _ in range(16)]
    assert calls == [None] * 15 + ["weight was written to past PyTorch's version counter"]


def test_replaced_tensors_are_freed():
    made = model()
    old = weakref.ref(made[0].weight)
    watch = WeightWatch(made.named_parameters())
    replace_weight(made)
    gc.collect()
    assert old() is None
    assert watch.changed() == "0.weight was replaced"


def test_inference_tensors_views_and_tensors_without_memory_are_watched_too():
    with torch.inference_mode():
        weight = torch.zeros(8)
    tensors = {
        "inference": weight,
        "transposed": torch.zeros(4, 8).t(),
        "empty": torch.zeros(0),
        "meta": torch.zeros(4, device="meta"),
        "sparse": torch.zeros(4, 4).to_sparse(),
    }
    watch = WeightWatch(tensors.items())
    assert watch.changed() is None
    with torch.inference_mode():
        weight.add_(1)
    assert watch.changed() == "inference was written to past PyTorch's version counter"
