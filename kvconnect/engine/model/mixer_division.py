"""Divides recurrent mixers among ranks: each computes some of the heads or channels.

A mixer ends in a linear layer, whose inputs lie in equal parts on the ranks, and whose outputs are
summed. Gradients show which elements of the other weights a part of these inputs depends on: the
rank keeps those. A norm over all inputs makes every part depend on every weight. Such a mixer is
computed whole by every rank.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvconnect.engine.model.mixer_probe import (
    CHUNKS,
    PROBED_TOKENS,
    STEPS,
    MixerProbe,
    ProbedCall,
    run_in_parts,
)
from kvconnect.engine.model.mixers import ModelCache, mapped
from kvconnect.engine.model.sharding import ModelRanks, sum_outputs
from kvconnect.engine.model.states import DividedStates, StateKey, StateRows, StateShape

_COUNTS: Mapping[str, tuple[str, ...]] = {
    "num_heads": ("intermediate_size", "qkv_dim"),
    "num_v_heads": ("value_dim",),
    "num_k_heads": ("key_dim",),
    "n_groups": ("groups_time_state_size",),
}
"""The attributes of mixers that count heads, each with its products."""

_CLOSE = 1e-8
"""The largest difference of parts and whole, both as sums of squares, relative to the whole."""

_UNFIT = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)
"""The errors of a mixer whose kernel has no gradients, or whose heads are counted elsewhere."""


class _Kept(NamedTuple):
    """The elements of a tensor that a part of a mixer needs: those at `indices` along `dim`."""

    dim: int
    indices: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A rank's part of a mixer.

    Attributes:
        number: the number of the rank.
        kept: the part of each parameter and buffer, by name; others are whole.
        channels: the channels of the convolution.
    """

    number: int
    kept: Mapping[str, _Kept]
    channels: Tensor


class MixerDivision:
    """The mixers that ranks divide; all others every rank computes whole.

    The division is tried on a copy of one mixer of each class and shape, with random weights and
    inputs in float64. These mixers are divided if the outputs of the parts add up to those of the
    whole, and the states of the parts are parts of its states. The result is the same on all ranks,
    because it depends on no value of the model.

    Args:
        probe: knows the mixers and their states; the mixers are not split yet.
        ranks: the ranks.
    """

    def __init__(self, probe: MixerProbe, ranks: ModelRanks) -> None:
        self._ranks = ranks
        self._found: list[tuple[ProbedCall, str, _Part]] = []
        self._rows: dict[StateKey, Sequence[Tensor]] = {}
        known: dict[object, _Trial | None] = {}
        uses = Counter(id(one) for call in probe.calls for one in call.module.parameters())
        for call in probe.calls:
            if any(uses[id(one)] > 1 for one in call.module.parameters()):
                continue  # a layer that has the same weights would be cut, too
            shapes = [probe.shapes[key] for key in call.keys]
            alike = (
                type(call.module),
                *(one.shape for one in call.module.parameters()),
                *(one.shape for one in shapes),
            )
            if alike not in known:
                known[alike] = _tried(call, shapes, ranks.size)
            if (trial := known[alike]) is None:
                continue
            self._found.append((call, trial.last, trial.parts[ranks.rank]))
            for one in shapes:
                self._rows[one.key] = [trial.rows(one, part) for part in trial.parts]

    def apply(self) -> DividedStates | None:
        """Cuts the weights of the divided mixers in place.

        Returns:
            The states' division; ``None``: no mixer is divided.
        """
        for call, last, part in self._found:
            _cut(call.module, last, part, self._ranks.size)
            sum_outputs(call.module.get_submodule(last), self._ranks)
        if not self._found:
            return None
        device = next(self._found[0][0].module.parameters()).device
        rows = {
            key: StateRows.of(parts, self._ranks.rank, device) for key, parts in self._rows.items()
        }
        return DividedStates(self._ranks, rows)


def _tried(call: ProbedCall, shapes: Sequence[StateShape], size: int) -> _Trial | None:
    """Returns the division of a mixer in `size` parts; ``None``: it is not to be divided."""
    linear = [one for one in call.module.modules() if isinstance(one, nn.Linear)]
    if not linear or any(type(one) is not nn.Linear for one in linear):
        return None  # quantised, or with an adapter
    convolutions = [one for one in call.module.modules() if isinstance(one, nn.Conv1d)]
    if len(convolutions) != 1 or convolutions[0].groups != convolutions[0].out_channels:
        return None
    try:
        trial = _Trial(call, shapes, size)
        return trial if trial.adds_up() else None
    except torch.OutOfMemoryError:  # a RuntimeError, of this rank alone
        raise
    except _UNFIT:
        return None


class _Trial:
    """A copy of a mixer, and its division in equal parts.

    Args:
        call: the call of the mixer.
        shapes: the shapes of its states.
        size: the number of parts.

    Attributes:
        last: the name of the mixer's last linear layer.
        parts: the parts in order; fewer than `size`: some depend on the whole mixer.
    """

    def __init__(self, call: ProbedCall, shapes: Sequence[StateShape], size: int) -> None:
        self._mixer, self._call = _random(call)
        self._shapes = [
            replace(one, dtype=torch.float64) if one.dtype.is_floating_point else one
            for one in shapes
        ]
        self._size = size
        self.last, inputs = _last_inputs(self._mixer, self._call, self._shapes)
        found = enumerate(inputs.chunk(size, dim=-1))
        parts = (_part(self._mixer, number, channels) for number, channels in found)
        self.parts = [one for one in parts if one is not None]

    def rows(self, state: StateShape, part: _Part) -> Tensor:
        """Returns the indices of a part's `state` along the first dimension of the whole one."""
        if state.key.kind == "conv":
            return part.channels
        count = state.shape[0] // self._size
        first = part.number * count
        return torch.arange(first, first + count, device=part.channels.device)

    @torch.inference_mode()
    def adds_up(self) -> bool:
        """Returns whether the parts together compute what the whole mixer computes.

        All tokens are computed at once, and then in two chunks and one by one, from the states
        before them. A part whose heads are counted elsewhere may raise any error of `_UNFIT`.
        """
        if len(self.parts) < self._size:
            return False
        ways = ((PROBED_TOKENS,), CHUNKS, STEPS)
        whole = [run_in_parts(self._mixer, self._call, self._shapes, ends) for ends in ways]
        totals = [torch.zeros_like(outputs) for outputs, _ in whole]
        for part in self.parts:
            mixer = copy.deepcopy(self._mixer)
            if not _cut(mixer, self.last, part, self._size):
                return False
            if part.number:
                mixer.get_submodule(self.last).register_parameter("bias", None)  # added once
            rows = {one.key: self.rows(one, part) for one in self._shapes}
            shapes = [
                replace(one, shape=(len(rows[one.key]), *one.shape[1:])) for one in self._shapes
            ]
            for ends, total, (_, states) in zip(ways, totals, whole, strict=True):
                outputs, found = run_in_parts(mixer, self._call, shapes, ends)
                total.add_(outputs)
                if not all(_close(found[key][0], states[key][0, one]) for key, one in rows.items()):
                    return False
        return all(
            _close(total, outputs) for total, (outputs, _) in zip(totals, whole, strict=True)
        )


def _last_inputs(
    mixer: nn.Module, call: ProbedCall, shapes: Sequence[StateShape]
) -> tuple[str, Tensor]:
    """Returns the name of a mixer's last linear layer, and its inputs, with their gradients."""
    inputs: dict[str, Tensor] = {}  # in the order of the calls

    def note(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs.pop(name, None)
            inputs[name] = args[0]

        return hook

    hooks = [
        one.register_forward_pre_hook(note(name))
        for name, one in mixer.named_modules()
        if isinstance(one, nn.Linear)
    ]
    for one in _tensors(mixer).values():
        one.requires_grad_()
    with torch.inference_mode(mode=False), torch.enable_grad():
        run_in_parts(mixer, call, shapes, (PROBED_TOKENS,))
    for hook in hooks:
        hook.remove()
    return list(inputs.items())[-1]


def _part(mixer: nn.Module, number: int, channels: Tensor) -> _Part | None:
    """Returns the part that some inputs of the last layer depend on.

    ``None``: they depend on all channels of the convolution.
    """
    tensors = _tensors(mixer)
    gradients: Sequence[Tensor | None] = torch.autograd.grad(
        channels.square().sum(), list(tensors.values()), retain_graph=True, allow_unused=True
    )
    kept = {}
    for name, gradient in zip(tensors, gradients, strict=True):
        if gradient is not None and (found := _needed(gradient)) is not None:
            kept[name] = found
    (convolution,) = [name for name, one in mixer.named_modules() if isinstance(one, nn.Conv1d)]
    rows = kept.get(f"{convolution}.weight")
    return None if rows is None or rows.dim else _Part(number, kept, rows.indices)


def _random(call: ProbedCall) -> tuple[nn.Module, ProbedCall]:
    """Returns a copy of a mixer, and a call of it, with random weights and inputs in float64."""
    generator = torch.Generator().manual_seed(0)

    def filled(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor.clone()
        values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return values.to(tensor.device)

    mixer = copy.deepcopy(call.module).double()
    for one in mixer.parameters():
        one.data = filled(one) * (one.shape[-1] ** -0.5 if one.ndim == 2 else 0.5)
    return mixer, ProbedCall(call.module, *mapped(call.args, call.named, filled, ModelCache()))


def _tensors(mixer: nn.Module) -> dict[str, Tensor]:
    named = (*mixer.named_parameters(), *mixer.named_buffers())
    return {name: one for name, one in named if one.is_floating_point()}


def _needed(gradient: Tensor) -> _Kept | None:
    """Returns the elements with a gradient; ``None``: all."""
    for dim, count in enumerate(gradient.shape):
        needed = gradient.movedim(dim, 0).reshape(count, -1).any(1).nonzero()[:, 0]
        if len(needed) < count:
            return _Kept(dim, needed)
    return None


def _close(found: Tensor, expected: Tensor) -> bool:
    difference = (found - expected).square().sum()
    return bool(difference <= _CLOSE * expected.square().sum())


def _cut(mixer: Any, last: str, part: _Part, size: int) -> bool:
    """Leaves one part of `size` in `mixer`; False: its heads are not to be divided."""
    for name, tensor in (*mixer.named_parameters(), *mixer.named_buffers()):
        if (kept := part.kept.get(name)) is not None:
            tensor.data = tensor.data.index_select(kept.dim, kept.indices)
    weight = mixer.get_submodule(last).weight
    weight.data = weight.data.chunk(size, 1)[part.number].clone()
    for module in mixer.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, nn.Conv1d):
            module.groups = module.in_channels = module.out_channels = len(part.channels)
        if hasattr(module, "conv_dim"):
            module.conv_dim = len(part.channels)
        for name in _COUNTS.keys() & module.__dict__.keys():
            count = getattr(module, name)
            shares = min(count, size)  # with fewer heads, several ranks have the same
            if count % shares or size % shares:
                return False
            for one in {name, *_COUNTS[name]} & module.__dict__.keys():
                setattr(module, one, getattr(module, one) // shares)
    return True
