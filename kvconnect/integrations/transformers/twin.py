"""A model made by its class from a configuration: without weights, unpatched, on no device."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions, no_tie_weights
from transformers.modeling_utils import local_torch_dtype

from kvconnect.digest.memory import NamedTensor


def twin_of(model: PreTrainedModel, config: Any = None) -> PreTrainedModel:
    """Makes the model that ``from_pretrained`` begins with; its tensors are on ``meta``.

    Args:
        model: names class, dtype and configuration.
        config: instead of the model's own; is not changed.
    """
    dtype = getattr(model.config, "dtype", None) or model.dtype
    made: Any = type(model)
    # The class sets fields of the configuration that it is given.
    given = deepcopy(model.config if config is None else config)
    with local_torch_dtype(dtype), no_tie_weights(), torch.device("meta"):
        twin: Any = made(given)
    twin.eval()
    return cast("PreTrainedModel", twin)


def initial_buffers(twin: PreTrainedModel, device: torch.device) -> list[NamedTensor]:
    """Returns the buffers that no file holds, as ``from_pretrained`` computes them on `device`.

    Args:
        twin: the twin of `twin_of`; its buffers are then on `device`.
        device: the device of buffers.
    """
    wanted = dict(twin.named_non_persistent_buffers())
    for tensor in (*twin.parameters(), *twin.buffers()):
        _mark(tensor)
    for path, buffer in wanted.items():
        parent, _, name = path.rpartition(".")
        # Like from_pretrained.
        owner: Any = twin.get_submodule(parent)
        owner.register_buffer(name, torch.empty_like(buffer, device=device), persistent=False)
    made: Any
    for made in twin.modules():
        made._is_hf_initialized = False  # noqa: SLF001  transformers' own mark
    dtype = getattr(twin.config, "dtype", None) or twin.dtype
    with local_torch_dtype(dtype), guard_torch_init_functions():
        twin.initialize_weights()  # type: ignore[no-untyped-call]
    return [(path, twin.get_buffer(path)) for path in wanted]


def _mark(tensor: Tensor) -> None:
    """Marks `tensor` so that `initialize_weights` does not fill it."""
    marked: Any = tensor
    marked._is_hf_initialized = True  # noqa: SLF001  transformers' own mark
