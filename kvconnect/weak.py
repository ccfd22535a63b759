"""Callbacks that do not keep the object alive that they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakMethod

__all__ = ["weakly"]

P = ParamSpec("P")
R = TypeVar("R")


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """Returns a function that calls the bound `method`, and does not keep its object alive.

    A part that is given a method of its owner closes a circle of references. The memory of a closed
    engine, its pools and weights, would then stay until Python looks for such circles, which may be
    never. So it is freed with the last reference to the owner.

    The caller guarantees that the object lives whenever the function is called.
    """
    reference, name = WeakMethod(method), method.__qualname__

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        alive = reference()
        if alive is None:
            raise ReferenceError(f"the owner of {name} has been freed")
        return alive(*args, **kwargs)

    return call
