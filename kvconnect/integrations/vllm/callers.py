"""The objects of vLLM that a connector is not given: those of the callers on its stack."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any

from torch import nn

_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
_CONFIGURATION = "vllm.config.vllm"
_FRAMES = 16  # between a configuration and the lookup of a class that it needs


def executor_of_caller() -> Any | None:
    """Returns the executor of the engine core that is being made on this thread, or ``None``."""
    for owner in _callers():
        executor = getattr(owner, "__dict__", {}).get("model_executor")
        if callable(getattr(executor, "collective_rpc", None)):
            return executor
    return None


def scheduler_of_caller() -> Any | None:
    """Returns the scheduler of vLLM that is being made on this thread, or ``None``."""
    for owner in _callers():
        if hasattr(type(owner), "add_request") and hasattr(type(owner), "schedule"):
            return owner
    return None


def model_of_caller() -> Callable[[], nn.Module] | None:
    """Returns `model_of` the calling model runner, or ``None``."""
    owners = (owner for owner in _callers() if hasattr(type(owner), "get_model"))
    return next(filter(None, map(model_of, owners)), None)


def model_of(owner: object) -> Callable[[], nn.Module] | None:
    """Returns a function that returns the model of `owner`, or ``None`` if it has none.

    The function returns another model once the owner, a worker or its model runner, has one.
    """
    get_model = getattr(owner, "get_model", None)
    if get_model is None:
        return None
    try:
        model = get_model()
    except NotImplementedError:  # an abstract base class
        return None
    return get_model if isinstance(model, nn.Module) else None


def is_configuring() -> bool:
    """Returns whether vLLM's configuration is being made on this thread."""
    callers = islice(_frames_of_callers(), _FRAMES)
    return any(caller.f_globals.get("__name__") == _CONFIGURATION for caller in callers)


def transfer_of_lookup() -> Any | None:
    """Returns the ``KVTransferConfig`` for which vLLM's configuration looks up a connector's class.

    Returns ``None`` for any other caller. Engines look the class up again, when the configuration
    is already made.
    """
    if not is_configuring():
        return None
    for caller in islice(_frames_of_callers(), _FRAMES):
        if caller.f_globals.get("__name__") == _FACTORY:
            transfer = caller.f_locals.get("kv_transfer_config")
            if transfer is not None:
                return transfer
    return None


def _frames_of_callers() -> Iterator[FrameType]:
    """Yields the frames of this thread, the innermost first."""
    caller: FrameType | None = sys._getframe(1)  # noqa: SLF001  the only way to a caller's names
    while caller is not None:
        yield caller
        caller = caller.f_back


def _callers() -> Iterator[object]:
    """Yields the ``self`` of each method that runs on this thread, the innermost first."""
    for caller in _frames_of_callers():
        owner = caller.f_locals.get("self")
        if owner is not None:
            yield owner
