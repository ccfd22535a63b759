"""Multiplies by a weight matrix, which is packed for oneDNN where that is faster.

A product of a few rows mostly reads the matrix. oneDNN reads one that lies in blocks of its own
order, where torch's plain product rearranges it every time.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

_HINT = 16
"""Rows that weights are packed for; the products of other counts are hardly slower."""

_PACKED_DTYPES = frozenset({torch.float32, torch.bfloat16})


class Projection:
    """The product ``rows @ weight.T + bias``, by torch itself.

    Attributes:
        least_rows: fewer take longer than as many.
    """

    least_rows = 1

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns the product, ``[..., out_features]``, of ``[..., in_features]``."""
        return linear(rows, self._weight, self._bias)

    def silu(self, rows: Tensor) -> Tensor:
        """Returns the product times its sigmoid, element by element."""
        return silu(self(rows), inplace=True)

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        """Returns the sum of the product and `other`."""
        return self(rows).add_(other)

    def times(self, rows: Tensor, other: Tensor) -> Tensor:
        """Returns the product times `other`, element by element."""
        return self(rows).mul_(other)


def project(*parts: nn.Linear) -> Projection:
    """Returns the products of `parts`, side by side, as one product.

    Where the weights are packed, `parts` keep theirs until `release`; else theirs change strides,
    not values, and become views of one matrix if there are several. Weights of `parts` lie on the
    CPU and are not used by other modules.
    """
    weight = parts[0].weight.data
    if len(parts) > 1:
        weight = torch.cat([part.weight.data for part in parts])
    if _packs(weight.dtype):
        packed = _Packed(weight, _bias(parts))
        if packed.agrees_with(weight):
            return packed
    weight = laid_out(weight)
    views = torch.split_with_sizes(weight, [part.out_features for part in parts])
    for part, view in zip(parts, views, strict=True):
        part.weight.data = view
    kept = weight if len(parts) > 1 else parts[0].weight  # which may yet move
    return Projection(kept, _bias(parts))


def release(module: nn.Linear, projection: Projection) -> None:
    """Releases the weight of `module`, replaced by `projection`: a packed matrix is kept once.

    The module's weight keeps shape and dtype, but any use of it raises.
    """
    if isinstance(projection, _Packed):
        empty = torch.empty_like(module.weight, device="meta")
        module.weight = nn.Parameter(empty, requires_grad=False)


class _Packed(Projection):
    """The product of oneDNN with a matrix in the order that it reads."""

    least_rows = 5  # its kernels for less wait for memory: 1.3 times as long

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # The functions that torch's own compiler calls; there are no public names.
        operations = torch.ops.mkldnn
        super().__init__(operations._reorder_linear_weight(weight, _HINT), bias)  # noqa: SLF001
        self._product = operations._linear_pointwise.default  # noqa: SLF001
        self._product_and = operations._linear_pointwise.binary  # noqa: SLF001

    def __call__(self, rows: Tensor) -> Tensor:
        product: Tensor = self._product(rows, self._weight, self._bias, "none", [], "")
        return product

    def silu(self, rows: Tensor) -> Tensor:
        product: Tensor = self._product(rows, self._weight, self._bias, "swish", [], "")
        return product

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        total: Tensor = self._product_and(rows, other, self._weight, self._bias, "add")
        return total

    def times(self, rows: Tensor, other: Tensor) -> Tensor:
        product: Tensor = self._product_and(rows, other, self._weight, self._bias, "mul")
        return product

    def agrees_with(self, weight: Tensor) -> bool:
        """Returns whether the products are those with the plain `weight`."""
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(2, weight.shape[1], generator=generator).to(weight.dtype)
        other = torch.randn(2, weight.shape[0], generator=generator).to(weight.dtype)
        with torch.inference_mode():
            plain = linear(rows, weight, self._bias)
            pairs = [
                (self(rows), plain),
                (self.silu(rows), silu(plain)),
                (self.plus(rows, other), plain + other),
                (self.times(rows, other), plain * other),
            ]
        return all(close(found, expected) for found, expected in pairs)


@functools.cache
def _packs(dtype: torch.dtype) -> bool:
    # Older processors lack the instructions for some dtypes, other builds of torch lack oneDNN.
    if dtype not in _PACKED_DTYPES:
        return False
    try:
        weight = torch.ones(16, 16, dtype=dtype)
        return _Packed(weight, None).agrees_with(weight)
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


def close(found: Tensor, expected: Tensor) -> bool:
    """Returns whether they differ by no more than the order of sums explains."""
    tolerance = torch.finfo(expected.dtype).eps ** 0.5 * float(expected.abs().max())
    return bool(torch.allclose(found, expected, rtol=0, atol=tolerance))


def _bias(parts: tuple[nn.Linear, ...]) -> Tensor | None:
    biases: list[Tensor | None] = [part.bias for part in parts]
    given = [bias.data for bias in biases if bias is not None]
    return torch.cat(given) if given else None


def laid_out(weight: Tensor) -> Tensor:
    """Returns `weight`, ``[out_features, in_features]``, with its longer side contiguous."""
    # A product with one row reads the matrix along its rows in memory: long ones are faster (by
    # half, from 512 to 2048 elements).
    out_features, in_features = weight.shape
    return weight.t().contiguous().t() if out_features >= in_features else weight.contiguous()
