"""Finds the recurrent mixers of a model, and checks that they continue from their states."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from kvconnect.engine.model.mixers import (
    Forward,
    ModelCache,
    Part,
    SequenceStates,
    called,
    is_rows,
    mapped,
)
from kvconnect.engine.model.states import StateKey, StateKind, StateShape, StateSlots
from kvconnect.errors import UnsupportedModel

PROBED_TOKENS = 5
"""The tokens that a model is probed with."""

CHUNKS = (2, PROBED_TOKENS)
"""The ends of two parts of them."""

STEPS = range(1, PROBED_TOKENS + 1)
"""The ends of single tokens."""


@dataclass(slots=True, eq=False)
class ProbedCall:
    """A call of a module.

    Attributes:
        module: the module.
        args: its arguments.
        named: its keyword arguments.
        keys: the states that it has written.
    """

    module: nn.Module
    args: Sequence[Any]
    named: dict[str, Any]
    keys: list[StateKey] = field(default_factory=list)


class MixerProbe(ModelCache):
    """A cache that stores nothing: records which modules keep which states.

    The model is called with `PROBED_TOKENS` tokens.

    Attributes:
        calls: the calls of the mixers, which read or write states.
        shapes: the shapes of the states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[ProbedCall] = []
        self.shapes: dict[StateKey, StateShape] = {}
        self._running: list[ProbedCall] = []
        self._asking: list[nn.Module] = []  # for a state before the first token

    def check_asking(self) -> None:
        """Checks that only mixers ask for previous states: sequences of a step differ in these.

        Raises:
            UnsupportedModel: another module does.
        """
        mixers = [call.module for call in self.calls]
        for module in self._asking:
            if module not in mixers:
                raise UnsupportedModel(
                    f"{type(module).__name__} asks its cache for previous states, which some "
                    "sequences of a step have and others do not"
                )

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Follows which module of `model` runs."""

        def enter(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._running.append(ProbedCall(module, args, named))

        def leave(*_: Any) -> None:
            self._running.pop()

        hooks = [
            hook
            for one in model.modules()
            for hook in (
                one.register_forward_pre_hook(enter, with_kwargs=True),
                one.register_forward_hook(leave),
            )
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Notes the mixer; there is no state."""
        self._note()

    get_recurrent_state = get_linear_cache = get_conv_state

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Notes the state, and returns it padded."""
        kernel = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
        full = nn.functional.pad(conv_states, (max(0, kernel - conv_states.shape[-1]), 0))
        self._note_state(layer_idx, "conv", state_idx, full[..., -kernel:])
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Notes the state."""
        self._note_state(layer_idx, "recurrent", state_idx, recurrent_states)
        return recurrent_states

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Notes the state."""
        self._note_state(layer_idx, "linear", 0, linear_cache)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Notes the caller, and returns False."""
        self._asking.append(self._running[-1].module)
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        """Returns False."""
        return False

    def __getattr__(self, name: str) -> NoReturn:
        """Refuses what `SequenceStates` does not have.

        Raises:
            UnsupportedModel: always.
        """
        module = type(self._running[-1].module).__name__ if self._running else "the model"
        raise UnsupportedModel(
            f"{module} uses {name} of its cache: the engine's states are those of transformers' "
            "linear attention layers, which have none"
        )

    def _note(self) -> None:
        call = self._running[-1]
        if call in self.calls:
            return
        for value in _tensors((*call.args, *call.named.values())):
            if value.shape[:2] != (1, PROBED_TOKENS):
                raise UnsupportedModel(
                    f"{type(call.module).__name__} is called with a tensor {tuple(value.shape)}, "
                    "which cannot be divided among the sequences of a step"
                )
        self.calls.append(call)

    def _note_state(self, layer_idx: int, kind: StateKind, state_idx: int, state: Tensor) -> None:
        self._note()
        key = StateKey(layer_idx, kind, state_idx)
        if key in self.shapes:
            raise UnsupportedModel(
                f"{type(self._running[-1].module).__name__} keeps the {kind} state {state_idx} of "
                f"layer {layer_idx} twice in one pass"
            )
        self._running[-1].keys.append(key)
        self.shapes[key] = StateShape(key, tuple(state.shape[1:]), state.dtype)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (tuple, list)):
            yield from _tensors(one)


def split_mixers(probe: MixerProbe) -> bool:
    """Makes the mixers that `probe` found compute the sequences of a packed row one by one.

    Called without `PackedStates`, they compute as before. One of each class is checked first, in
    float64, since rounding would hide what it leaves out.

    Returns:
        Whether some of them take no states for several tokens.

    Raises:
        UnsupportedModel: the states of a mixer do not stand for the tokens before.
    """
    probe.check_asking()
    any_stepped = False
    for kind in {type(call.module) for call in probe.calls}:
        alike = [call for call in probe.calls if type(call.module) is kind]
        check = _Check(alike[0], probe)
        if not check.continues(STEPS):
            raise UnsupportedModel(
                f"{kind.__name__} computes something else from a token and its states than from "
                "all tokens at once"
            )
        stepped = not check.continues(CHUNKS)
        for call in alike:
            call.module.forward = _split(call.module.forward, stepped=stepped)
        any_stepped |= stepped
    return any_stepped


def _split(mixer: Forward, *, stepped: bool) -> Forward:
    def split(*args: Any, **named: Any) -> Any:
        for one in (*args, *named.values()):
            if isinstance(one, ModelCache) and one.states is not None:
                return one.states.run(mixer, args, named, stepped=stepped)
        return mixer(*args, **named)

    return split


class _Check:
    """Compares the outputs of a mixer for all tokens at once with those for parts of them.

    Args:
        call: the call of the mixer in the probe.
        probe: knows its states.
    """

    def __init__(self, call: ProbedCall, probe: MixerProbe) -> None:
        self._mixer = copy.deepcopy(call.module).double()
        self._call = call
        self._states = [
            replace(one, dtype=torch.float64) if one.dtype.is_floating_point else one
            for one in probe.shapes.values()
        ]
        self._whole = self._outputs((PROBED_TOKENS,))

    def continues(self, ends: Sequence[int]) -> bool:
        """Returns whether tokens up to each of `ends`, one part after the other, give the same.

        Some mixers take no states for several tokens. Recurrences that compute in float32 deviate
        by up to a ten thousandth of the effect of each kind of their states. Three times as much
        is another computation.
        """
        written = self._call.keys or [one.key for one in self._states]
        kinds = {key.kind for key in written}
        effects = [self._distance(self._outputs(ends, without=one)) for one in kinds]
        return self._distance(self._outputs(ends)) <= 1e-7 * min(effects)  # sums of squares

    def _outputs(self, ends: Sequence[int], without: StateKind | None = None) -> Tensor:
        with torch.inference_mode():
            return run_in_parts(self._mixer, self._call, self._states, ends, without=without)[0]

    def _distance(self, outputs: Tensor) -> float:
        return float((self._whole - outputs).square().sum())


def run_in_parts(
    mixer: nn.Module,
    call: ProbedCall,
    shapes: Sequence[StateShape],
    ends: Sequence[int],
    *,
    without: StateKind | None = None,
) -> tuple[Tensor, StateSlots]:
    """Computes the probed tokens, in float64.

    Args:
        mixer: a mixer in float64.
        call: the call in the probe, whose arguments are used.
        shapes: the shapes of the mixer's states.
        ends: the ends of the parts that are computed one after the other.
        without: the kind of states that are always zero.

    Returns:
        The outputs, ``[tokens, values]``, and the states after them, in one slot.
    """
    args, named = mapped(call.args, call.named, _doubled, ModelCache())
    device = next(mixer.parameters()).device
    slots = StateSlots(shapes, 1, device)
    outputs = []
    for start, end in pairwise((0, *ends)):
        for one in shapes:
            if one.key.kind == without:
                slots[one.key].zero_()
        index = torch.zeros(1, dtype=torch.int64, device=device)
        part = Part(slice(start, end), [0], start > 0, index)
        found = called(mixer, args, named, SequenceStates(slots, part))
        results = found if isinstance(found, tuple) else (found,)
        rows = [one[0].flatten(1) for one in results if is_rows(one, part)]
        outputs.append(torch.cat(rows, dim=1))
    return torch.cat(outputs), slots


def _doubled(value: Tensor) -> Tensor:
    return value.to(torch.float64 if value.is_floating_point() else value.dtype, copy=True)
