"""Loads models of transformers from their directories, with our attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
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
