"""The digest of tensors in memory, and pairs of digests that were found to be of one content."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kvconnect.digest.cache import ProvenContents
from kvconnect.digest.memory import content_of_tensors, module_tensors, pieces, same_bits

LEAF = 16 << 20


def weight(**more: object) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 8, generator=generator, **more)


BASE = content_of_tensors([("a", weight()), ("b", weight())])


@pytest.mark.parametrize(
    "other",
    [
        [("a", weight())],
        [("a", weight()), ("c", weight())],
        [("a", weight()), ("b", weight().view(8, 6))],
        [("a", weight()), ("b", weight().view(torch.int32))],
        [("a", weight()), ("b", -weight())],
        [("a", weight()), ("b", weight().double())],
        [("a", weight()), ("b", weight()), ("", torch.zeros(0))],
    ],
)
def test_a_name_a_shape_a_dtype_and_content_make_another_digest(other):
    assert content_of_tensors(other) != BASE


def test_order_strides_and_memory_make_no_difference():
    across = weight().t().contiguous().t()
    assert not across.is_contiguous()
    tied = weight()
    for same in (
        [("b", weight()), ("a", weight())],
        [("a", across), ("b", weight())],
        [("a", tied), ("b", tied)],
        [("a", torch.cat([weight(), weight()])[6:]), ("b", weight())],
    ):
        assert content_of_tensors(same) == BASE


@pytest.mark.parametrize("at", [0, LEAF - 1, LEAF, 2 * LEAF + 4])
def test_each_byte_of_a_large_tensor_counts(at):
    tensor = torch.zeros(2 * LEAF + 5, dtype=torch.uint8)
    before = content_of_tensors([("a", tensor)])
    tensor[at] = 1
    assert content_of_tensors([("a", tensor)]) != before


def test_all_tensors_of_a_module_are_found():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[0].register_buffer("hidden", torch.zeros(1), persistent=False)
    module[1].plain = torch.zeros(1)
    names = {name for name, _ in module_tensors(module)}
    assert names >= {"0.weight", "0.hidden", "1.running_mean", "1.plain"}


def test_pieces_are_in_row_major_order_and_bits_are_compared():
    tensor = torch.arange(60).view(3, 4, 5).transpose(0, 2)
    assert torch.cat(list(pieces(tensor, 56))).equal(tensor.reshape(-1))
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, torch.tensor([float("nan"), -0.0]))
    assert not same_bits(nan, nan[:1])


def test_pairs_are_kept_once(tmp_path):
    one, other = bytes(32), b"\1" * 32
    ProvenContents(tmp_path).add(one, other)
    ProvenContents(tmp_path).add(one, other)
    assert ProvenContents(tmp_path).has(one, other)
    assert not ProvenContents(tmp_path).has(other, one)
    (file,) = tmp_path.iterdir()
    assert len(file.read_bytes().splitlines()) == 1
