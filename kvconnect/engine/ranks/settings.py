"""The settings that ranks share, and the device and memory that each may take."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import SecretStr

from kvconnect.config import KvCacheConfig, KvCacheConnectorConfig
from kvconnect.errors import ConfigurationError
from kvconnect.settings import Settings


@dataclass(frozen=True, slots=True)
class RankSettings:
    """The settings that all ranks of an engine have in common.

    Attributes:
        size: the number of ranks.
        directory: the directory of the model.
        dtype: see `Model`.
        device: the device of all ranks, ``cpu`` or ``cuda``.
        revision: see `model_digest`.
        kv_cache: the KV cache of the leader; the others get as many blocks.
        connector: the connector that every rank attaches; ``None``: none.

    Raises:
        ConfigurationError: `connector` has a store that is an object of the leader's process, or a
            class of settings cannot be imported in another one.
    """

    size: int
    directory: Path
    dtype: str
    device: str
    revision: str | None
    kv_cache: KvCacheConfig
    connector: KvCacheConnectorConfig | None

    def __post_init__(self) -> None:
        if self.connector is not None and self.connector.backend is not None:
            raise ConfigurationError(
                f"connector.backend: with tensor_parallel_size={self.size} every rank opens the "
                "store in its own process; give connector.url"
            )
        for field, given in (("kv_cache", self.kv_cache), ("connector", self.connector)):
            if given is not None and not _is_importable(type(given)):
                raise ConfigurationError(
                    f"{field}: other ranks cannot import {type(given).__qualname__} of "
                    f"{type(given).__module__}; define it at the top of a module other than the "
                    "script's"
                )

    @property
    def load_timeout_s(self) -> float:
        """The seconds that a rank may wait for a load in a step."""
        return 0.0 if self.connector is None else self.connector.load_timeout_s

    def encode(self) -> str:
        """Returns the settings as one line of JSON."""
        given: dict[str, Any] = asdict(self) | {
            "directory": str(self.directory),
            "kv_cache": _given(self.kv_cache),
            "connector": None if self.connector is None else _given(self.connector),
        }
        return json.dumps(given, default=_plain)

    @classmethod
    def decode(cls, line: str) -> Self:
        """Reads the settings from a line of `encode`.

        Raises:
            ConfigurationError: a setting is wrong.
        """
        given: dict[str, Any] = json.loads(line)
        connector = given["connector"]
        return cls(
            **given
            | {
                "directory": Path(given["directory"]),
                "kv_cache": _made("kv_cache", given["kv_cache"]),
                "connector": None if connector is None else _made("connector", connector),
            }
        )


def _given(settings: Settings) -> dict[str, Any]:
    """Returns the class of `settings`, perhaps a subclass, and the fields that the user set."""
    of = type(settings)
    return {
        "module": of.__module__,
        "name": of.__qualname__,
        "fields": settings.model_dump(exclude_unset=True),
    }


def _made(field: str, given: Mapping[str, Any]) -> Any:
    """Makes the settings of `_given` on another rank."""
    made: type[Settings] = getattr(import_module(given["module"]), given["name"])
    return made.given(field, given["fields"])


def _is_importable(of: type) -> bool:
    there = getattr(sys.modules.get(of.__module__), of.__qualname__, None)
    return there is of and of.__module__ != "__main__"


def _plain(value: object) -> object:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    raise TypeError(f"{type(value).__name__} is no JSON")


def check_tensor_parallel_size(size: object, manager: object) -> None:
    """Checks that an engine can have so many ranks.

    Args:
        size: the user's number of ranks.
        manager: the user's own cache manager; ``None``: there is none.

    Raises:
        ConfigurationError: the engine cannot have `size` ranks.
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigurationError(f"tensor_parallel_size: {size!r} must be an integer, at least 1")
    if size > 1 and manager is not None:
        raise ConfigurationError(
            f"kv_cache_manager: a cache manager of your own serves one rank, and "
            f"tensor_parallel_size is {size}"
        )


def rank_device(device: str, rank: int, size: int) -> str:
    """Returns the device of a rank: ``cpu`` or ``cuda:rank``.

    Args:
        device: the user's device.
        rank: the rank on this machine.
        size: the number of ranks.

    Raises:
        ConfigurationError: `device` is one GPU for several ranks, or there are too few GPUs.
    """
    if size == 1:
        return device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        return device
    if device != "cuda":
        raise ConfigurationError(
            f"device: '{device}' is one device, and tensor_parallel_size is {size}; use cuda or cpu"
        )
    if (count := torch.cuda.device_count()) < size:
        raise ConfigurationError(
            f"tensor_parallel_size: {size} ranks need as many GPUs, and there are {count}"
        )
    return f"cuda:{rank}"


def limited(config: KvCacheConfig, nbytes: int) -> KvCacheConfig:
    """Returns `config` for a cache of at most `nbytes` bytes; 0: no further limit."""
    if not nbytes:
        return config
    given = config.max_gpu_total_bytes or nbytes
    return config.model_copy(update={"max_gpu_total_bytes": min(given, nbytes)})
