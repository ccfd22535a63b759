"""The steps of SGLang's scheduler, as hooks on its methods see them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvconnect.integrations.core.load_choice import LoadChoice
from kvconnect.integrations.sglang.weights import REGISTRY

_SCHEDULER = "sglang.srt.managers.scheduler"
_BEGINS, _ENDS = "run_batch", "process_batch_result"


class Steps:
    """Reports the batches of this process's scheduler to a `LoadChoice`.

    Without SGLang's hooks, or where its methods are others, nothing is reported: then loads are
    never found to be slower than computing.

    Attributes:
        choice: receives the steps; ``None``: no storage is open.
    """

    def __init__(self) -> None:
        self.choice: LoadChoice | None = None
        self._hooked: object = None

    def hook(self) -> None:
        """Reports batches from now on. Idempotent."""
        try:
            registry = import_module(REGISTRY)
            scheduler = import_module(_SCHEDULER).Scheduler
        except (ImportError, AttributeError):
            return
        kinds = registry.HookType
        if self._hooked is scheduler or not (hasattr(kinds, "BEFORE") and hasattr(kinds, "AFTER")):
            return
        if not (hasattr(scheduler, _BEGINS) and hasattr(scheduler, _ENDS)):
            return
        self._hooked = scheduler
        for name, hook, kind in (
            (_BEGINS, self._begins, kinds.BEFORE),
            (_ENDS, self._ends, kinds.AFTER),
        ):
            registry.HookRegistry.register(f"{_SCHEDULER}.Scheduler.{name}", hook, kind)
        registry.HookRegistry.apply_hooks()

    def _begins(self, _: Any, batch: Any = None, *__: Any, **___: Any) -> None:
        if (choice := self.choice) is not None:
            choice.begin_step(*_work_of(batch))

    def _ends(self, *_: Any, **__: Any) -> None:
        if (choice := self.choice) is not None:
            choice.end_step()


def _work_of(batch: Any) -> tuple[int, float]:
    """Returns the tokens that a batch computes and the sum of their contexts; zeros: unknown."""
    lengths, prefixes = getattr(batch, "extend_lens", None), getattr(batch, "prefix_lens", None)
    is_decode = getattr(getattr(batch, "forward_mode", None), "is_decode", None)
    if is_decode is not None and is_decode():
        requests, context = getattr(batch, "reqs", ()), getattr(batch, "seq_lens_sum", None)
        return (len(requests), float(context)) if isinstance(context, int) else (0, 0.0)
    if not (isinstance(lengths, list) and isinstance(prefixes, list)):
        return 0, 0.0
    context = sum(n * (start + n / 2) for n, start in zip(lengths, prefixes, strict=False))
    return sum(lengths), context


steps = Steps()
"""The steps of this process, which has one scheduler."""
