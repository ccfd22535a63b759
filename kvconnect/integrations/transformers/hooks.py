"""The hooks into a model's forward pass that report its tokens to caches."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from torch import nn

from kvconnect.integrations.transformers.pass_times import PassTimes
from kvconnect.integrations.transformers.stored_cache import StoredCache

# The code in which torch runs a module's hooks and `forward`.
_CALL = nn.Module._call_impl.__code__  # noqa: SLF001  no name of it is public
_CUT = ("input_ids", "position_ids", "cache_position")


class PassHooks:
    """Reports forward passes of a model to its live caches, until `remove`.

    Args:
        model: is hooked as a whole; passes of its parts are not seen.
        live: its caches.
        times: measures the passes.
    """

    def __init__(
        self, model: nn.Module, live: weakref.WeakSet[StoredCache], times: PassTimes
    ) -> None:
        self._model = model
        self._live = live
        self._times = times
        self._names = tuple(inspect.signature(model.forward).parameters)  # for positional arguments
        self._handles = (
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True, always_call=True),
        )

    @property
    def in_pass(self) -> bool:
        """Returns whether a forward pass of the model is under way on this thread.

        Inspects the stack, since no hook runs at the end of an interrupted pass.
        """
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code is _CALL and frame.f_locals.get("self") is self._model:
                return True
            frame = frame.f_back
        return False

    def remove(self) -> None:
        """Removes the hooks, so that passes are no longer reported."""
        for handle in self._handles:
            handle.remove()

    def _before(
        self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = self._by_name(args, named)
        cache = given.get("past_key_values")
        if not isinstance(cache, StoredCache) or cache not in self._live:
            return args, named
        repeated = cache.num_repeated(given.get("input_ids"))
        if repeated:
            cut = {one: given[one][..., repeated:] for one in _CUT if given.get(one) is not None}
            args, named = (), given | cut
            given = named
        cache.forward_begins(given)
        if (ids := given.get("input_ids")) is not None:
            self._times.begin(cache, ids.shape[0], ids.shape[1])
        return args, named

    def _after(
        self, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: object
    ) -> None:
        cache = self._by_name(args, named).get("past_key_values")
        if isinstance(cache, StoredCache) and cache in self._live:
            cache.forward_ended(succeeded=output is not None)
            self._times.end(cache, succeeded=output is not None)

    def _by_name(self, args: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        return dict(zip(self._names, args, strict=False)) | named
