"""The ops as torch sees them: ``torch.ops.kvconnect.*``, so that they trace and export.

Each module registers its own. The ops take tensors only, change what their schema says in place,
and return nothing: what torch's compiler can reason about.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["register"]

_LIBRARY = torch.library.Library("kvconnect", "DEF")  # type: ignore[no-untyped-call]
_HOST_AND_DEVICE = ("CPU", "CUDA")


def _nothing(*_: object) -> None:
    """An op that only changes its arguments has nothing to make."""


def register(
    schema: str, implementation: Callable[..., None], fake: Callable[..., None] = _nothing
) -> Callable[..., None]:
    """Define an op.

    Args:
        schema: in torch's notation, with ``-> ()``.
        implementation: runs it, on tensors of the host and of CUDA devices.
        fake: checks what can be checked without values, for tracing.

    Returns:
        The op, ready to be called (2 µs; ``torch.library.custom_op`` would take 15).
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    for key in _HOST_AND_DEVICE:
        _LIBRARY.impl(name, implementation, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"kvconnect::{name}", fake, lib=_LIBRARY)
    op: Callable[..., None] = getattr(torch.ops.kvconnect, name).default
    return op
