"""The view of a pool for connectors: its ``cpu`` and ``to`` copy even from host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_TO_HOST = frozenset({Tensor.cpu, Tensor.to})


class PoolView(Tensor):
    """A pool in host memory, or a part of it.

    Connectors copy a block off a device with ``pool[block].cpu()``. On a pool in host memory torch
    would return a view of the block itself: later writes to the block would be saved in its place,
    and ``torch.save`` would save the whole pool. So `cpu` and `to` copy here; everything else is as
    with any tensor.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001  documented for this
            result = func(*args, **(kwargs or {}))
            if func in _TO_HOST:
                return _apart(result, args[0])
            return _within(result, args)


def pool_view(pool: Tensor) -> Tensor:
    """Returns `pool` itself on a device, else a `PoolView` of it."""
    return pool.as_subclass(PoolView) if pool.is_cpu else pool


def _apart(result: Tensor, source: Tensor) -> Tensor:
    plain = result.as_subclass(Tensor)
    return plain.clone() if _same(plain, source) else plain


def _within(result: Any, args: tuple[Any, ...]) -> Any:
    """Returns `result`: parts of the pool as `PoolView`, computed tensors as plain tensors."""
    if isinstance(result, (tuple, list)) and any(isinstance(one, Tensor) for one in result):
        return type(result)([_within(one, args) for one in result])
    if not isinstance(result, Tensor) or (args and result is args[0]):
        return result
    views = any(isinstance(one, PoolView) and _same(result, one) for one in args)
    return result.as_subclass(PoolView if views else Tensor)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
