"""A small computation that is repeated, to check that it still gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kvconnect.digest.memory import same_bits

CanaryRun: TypeAlias = Callable[[], Sequence[Tensor]]
"""Computes results that depend on everything that is watched, and returns them."""

_NUM_TRIES = 2


class Canary:
    """The results of a computation, to be compared bit for bit with those of later runs.

    Finds changes that no counter shows: optimizers and kernels that write past PyTorch's version
    counter, dropout, hooks, adapters that are switched, changed buffers and settings.

    The constructor runs the computation twice, and once more if the two results differ (lazy
    initialisation, autotuning). It blocks meanwhile. The random generators of the CPU and of
    `device` are restored afterwards, and after each `agrees`.

    Args:
        run: the computation; called on the caller's thread.
        device: the device of the results.

    Attributes:
        stable: whether the last two of these runs agreed. If not, `agrees` always returns False.
    """

    def __init__(self, run: CanaryRun, device: torch.device) -> None:
        self._run = run
        self._device = device
        self.stable = False
        with _random_numbers_kept(device):
            self._kept = self._results()
            for _ in range(_NUM_TRIES):
                before, self._kept = self._kept, self._results()
                self.stable = _equal(before, self._kept)
                if self.stable:
                    break

    def agrees(self) -> bool:
        """Runs the computation again and returns whether every bit is equal. Blocks meanwhile."""
        if not self.stable:
            return False
        with _random_numbers_kept(self._device):
            return _equal(self._kept, self._results())

    def _results(self) -> list[Tensor]:
        """Returns the results as one flat tensor for each dtype, so that few are compared."""
        with torch.no_grad():
            results = self._run()
            kinds = dict.fromkeys(one.dtype for one in results)
            return [
                torch.cat([one.reshape(-1) for one in results if one.dtype == kind])
                for kind in kinds
            ]


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Restores the random generators after the block if numbers were drawn.

    Runs must not all begin from one state, as with `torch.random.fork_rng`: then dropout would give
    the same result each time.
    """
    host: Any = torch.random
    states: list[tuple[Any, dict[str, Any], Tensor]] = [(host, {}, host.get_rng_state())]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        states.append((module, {"device": device}, module.get_rng_state(device)))
    try:
        yield
    finally:
        for module, where, state in states:
            if not torch.equal(module.get_rng_state(**where), state):
                module.set_rng_state(state, **where)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(
        one.dtype == other.dtype and same_bits(one, other)
        for one, other in zip(some, others, strict=True)
    )
