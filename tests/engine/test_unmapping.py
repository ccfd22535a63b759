"""Weights are the process's own, and share memory with each other as they did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from kvconnect.engine.model.pretrained import unmap


@pytest.fixture
def mapped(tmp_path: Path):
    """Makes tensors that are the file, and says whether one is it still."""
    file = tmp_path / "weights"
    torch.arange(1000, dtype=torch.float32).numpy().tofile(file)

    def make() -> torch.Tensor:
        return torch.from_file(str(file), shared=False, size=1000)

    make.file = file
    return make


def write(file: Path) -> None:
    with file.open("r+b") as written:
        written.write(bytes(4000))


def test_mapped_weights_and_buffers_are_copied(mapped):
    model = nn.Module()
    model.weight = nn.Parameter(mapped()[:600].view(20, 30))
    model.register_buffer("scale", mapped()[601:])
    model.turned = nn.Parameter(mapped()[:600].view(20, 30).t())
    model.whole = nn.Parameter(mapped().view(torch.int32), requires_grad=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    unmap(model)
    write(mapped.file)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(tensor.is_contiguous() for tensor in after.values())


def test_without_it_they_would_change(mapped):
    weight = mapped()
    write(mapped.file)
    assert not weight.any()


def test_tied_weights_stay_tied(mapped):
    one, model = mapped(), nn.Module()
    model.first, model.second = nn.Parameter(one), nn.Parameter(one)
    unmap(model)
    assert model.first.data_ptr() == model.second.data_ptr() != one.data_ptr()


def test_memory_of_the_process_stays_where_it_is():
    model = nn.Linear(300, 300)
    before = model.weight.data_ptr()
    unmap(model)
    assert model.weight.data_ptr() == before
