"""The decision whether a model may keep its name in keys."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvconnect.digest.canary import Canary
from kvconnect.digest.doubts import Doubt
from kvconnect.digest.watch import WeightWatch
from kvconnect.integrations.transformers.cache_layers import cached_tensors, empty_cache
from kvconnect.integrations.transformers.structure import Change, Structure


class ModelGuard:
    """A guard that watches a model from the moment at which it was named.

    `glance` is cheap: it compares counters, attributes and settings. `check` also runs the canary.
    A change that it finds is final: the model needs another name.

    Args:
        model: as it was named. Computes 32 tokens, or 48, for this.
        device: on which it computes.
        interval_s: seconds for which a good check holds before something is loaded.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, *, interval_s: float) -> None:
        self._device = device
        self._interval_s = interval_s
        self._process = os.getpid()
        # Frequencies that change with a prompt's length are left to the canary.
        self._watch = WeightWatch.of(model, buffers=not _rope_varies(model))
        self._structure = Structure(model)
        self._autocast = _autocast(device)
        self._turn = threading.Lock()
        self._holder: int | None = None
        self._doubt: Change | None = None
        self._canary: Canary | None = None
        if model.training:
            self._doubt = Change(Doubt.TRAINING, "call model.eval() and make another PromptCache")
            return
        self._canary = Canary(partial(canary_pass, model), device)
        if not self._canary.stable:
            self._doubt = Change(Doubt.CANARY_UNSTABLE, "")
        self._good_at = time.monotonic()

    @property
    def doubt(self) -> Change | None:
        """The reason why nothing is loaded and saved any more; ``None`` without doubt."""
        return self._doubt

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Lets one thread check at a time; yields whether the caller may check.

        Yields False inside a check, since hooks of the model may call for another. Yields False in
        a forked process, too.
        """
        if self._holder == threading.get_ident() or os.getpid() != self._process:
            yield False
            return
        with self._turn:
            self._holder = threading.get_ident()
            try:
                yield True
            finally:
                self._holder = None

    @property
    def is_due(self) -> bool:
        """Returns whether the last good check is too old, or something may have changed since."""
        if self._doubt is not None:
            return False
        late = time.monotonic() - self._good_at >= self._interval_s
        return late or self.glance() is not None

    def glance(self) -> Change | None:
        """Returns a change that cheap checks find since the last good check, or ``None``.

        Only a canary can decide whether hooks and attributes of modules matter.
        """
        if self._doubt is not None:
            return self._doubt
        written = self._watch.changed()
        if written is not None:
            return Change(Doubt.WEIGHTS_CHANGED, written)
        return self._structure.change()

    def check(self) -> Change | None:
        """Runs the canary; returns why the model has no name any more, or ``None``.

        Call it in a `turn`. A change is final: see `doubt`.
        """
        if self._doubt is not None:
            return self._doubt
        change = self.glance()
        decides = change is None or change.doubt is Doubt.MODULES_CHANGED
        if decides and self._canary_agrees():
            if change is not None:
                self._structure.take()
            self._good_at = time.monotonic()
            return None
        self._doubt = change or Change(Doubt.CANARY, "")
        return self._doubt

    def autocast_doubt(self) -> Change | None:
        """Returns why the calling thread's ``torch.autocast`` changes results, or ``None``."""
        same = _autocast(self._device) == self._autocast
        return None if same else Change(Doubt.SETTINGS_CHANGED, "torch.autocast")

    def _canary_agrees(self) -> bool:
        enabled, dtype = self._autocast
        with torch.autocast(self._device.type, dtype=dtype, enabled=enabled):
            return self._canary is not None and self._canary.agrees()


def _rope_varies(model: nn.Module) -> bool:
    """Returns whether the rotary embedding replaces its buffers for long prompts, and back."""
    kinds: list[Any] = [getattr(module, "rope_type", None) for module in model.modules()]
    return any(
        kind in {"dynamic", "longrope"}
        for given in kinds
        for kind in (given.values() if isinstance(given, dict) else (given,))
    )


def _autocast(device: torch.device) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)


_NUM_TOKENS = 16
# Coprime to every vocabulary's size, so that ids lie far apart.
_STEP = 1_000_003


def canary_pass(model: PreTrainedModel) -> list[Tensor]:
    """Computes 16 fixed tokens, with the model's own ``forward`` and all its hooks.

    Returns what each layer keeps (keys, values, states) and the logits after each token. The model
    is neither changed nor put into another mode.
    """
    past = empty_cache(model.config)
    output: Any = model(
        input_ids=canary_ids(model, _NUM_TOKENS), past_key_values=past, use_cache=True
    )
    layers: list[Any] = past.layers
    return [*cached_tensors(layers), results_of(output)]


def results_of(output: Any) -> Tensor:
    """Returns the logits of a model's output; of a model without a head, its last states."""
    logits: Tensor | None = getattr(output, "logits", None)
    states: Tensor = output.last_hidden_state if logits is None else logits
    return states


def canary_ids(model: PreTrainedModel, count: int) -> Tensor:
    """Returns `count` ids, ``[1, count]``, that are the same for each model of a vocabulary."""
    embeddings: Any = model.get_input_embeddings()
    size = int(embeddings.weight.shape[0])
    ids = [(_STEP * (number + 1)) % size for number in range(count)]
    return torch.tensor([ids], device=model.device)
