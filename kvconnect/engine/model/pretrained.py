"""Loads models of transformers from their directories, with our attention.

`unmap` copies their weights out of mapped files: a write to such a file would change the model.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from kvconnect.config import torch_dtype
from kvconnect.engine.model.own_attention import OWN_ATTENTION
from kvconnect.engine.model.seam import ATTENTION
from kvconnect.errors import ConfigurationError


def load_config(directory: Path) -> PreTrainedConfig:
    """Returns the configuration of the model in `directory`.

    Raises:
        ConfigurationError: the directory is wrong.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model: '{directory}' cannot be loaded: {error}") from error
    return config


def load(directory: Path, config: PreTrainedConfig, dtype: str) -> Any:  # a PreTrainedModel
    """Returns the model in `directory`, with `config` and weights in `dtype`; see `Model`.

    Raises:
        ConfigurationError: the directory or `dtype` is wrong, or weights are missing.
    """
    wanted = dtype if dtype == "auto" else torch_dtype(dtype)
    # Grouped matrix products of experts do not exist in float64.
    resolved = getattr(config, "dtype", None) if dtype == "auto" else wanted
    experts = {"experts_implementation": "eager"} if resolved == torch.float64 else {}
    try:
        with _no_thread_of_progress_bars():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=wanted,
                attn_implementation=None if config.model_type in OWN_ATTENTION else ATTENTION,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **experts,
            )
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"model: '{directory}' cannot be loaded: {error}") from error
    model, info = loaded
    # Missing weights are random and differ between processes, which no digest shows.
    if missing := sorted(info["missing_keys"]):
        raise ConfigurationError(
            f"model: '{directory}' has no weights of {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}: it is incomplete, or of another architecture"
        )
    return model


@contextmanager
def _no_thread_of_progress_bars() -> Iterator[None]:
    """Keeps tqdm from starting its thread, which redraws bars that stand still.

    The thread ends with the interpreter wherever it is. If it holds tqdm's lock then, the end of
    the process waits for that lock for ever.
    """
    before, tqdm.monitor_interval = tqdm.monitor_interval, 0
    try:
        yield
    finally:
        tqdm.monitor_interval = before


_ALIGNMENT = 64


def unmap(model: nn.Module) -> None:
    """Copies weights and buffers of `model` that lie in mapped files into memory of the process.

    transformers maps safetensors files; on the CPU, what needs no conversion stays where it is in
    the file, and is read again whenever its pages were dropped. Weights that share memory share it
    afterwards.
    """
    mapped = _MappedFiles.now()
    tensors = itertools.chain(model.parameters(), model.buffers())
    found = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor in mapped]
    memory = _allocate(sum(map(_room, found)))
    copies: dict[tuple[object, ...], Tensor] = {}
    start = 0
    for tensor in found:
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in copies:
            nbytes = tensor.numel() * tensor.element_size()
            copy = memory[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
            copies[key] = copy.copy_(tensor.data)
            start += _room(tensor)
        tensor.data = copies[key]


class _MappedFiles:
    """The addresses of this process that map a file."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        self._ranges = sorted(ranges)

    @classmethod
    def now(cls) -> _MappedFiles:
        return cls(list(_file_ranges(Path("/proc/self/maps").read_text(encoding="utf-8"))))

    def __contains__(self, tensor: Tensor) -> bool:
        at = bisect.bisect_right(self._ranges, (tensor.data_ptr(), 2**64)) - 1
        return at >= 0 and tensor.data_ptr() < self._ranges[at][1]


def _file_ranges(maps: str) -> Iterator[tuple[int, int]]:
    for line in maps.splitlines():
        addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
        if inode != "0":
            low, high = addresses.split("-")
            yield int(low, 16), int(high, 16)


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _allocate(nbytes: int) -> Tensor:
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    region = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        region.madvise(mmap.MADV_HUGEPAGE)  # a kernel without them: slower the first time
    return torch.frombuffer(region, dtype=torch.uint8)
