"""The process's rank, log and version, and the function ``valid_page_slots``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch.distributed

__version__ = "1.4.0+kvconnect"
"""The newest version whose connector interface is answered here."""


def mpi_rank() -> int:
    """Returns this process's rank: 0, unless ``torch.distributed`` runs."""
    return torch.distributed.get_rank() if _distributed() else 0


def mpi_world_size() -> int:
    """Returns the number of ranks: 1, unless ``torch.distributed`` runs."""
    return torch.distributed.get_world_size() if _distributed() else 1


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def valid_page_slots(page_indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yields number and id of each block in a list of ids; -1 stands where there is none."""
    return ((number, slot) for number, slot in enumerate(page_indices) if slot >= 0)


class Logger(logging.LoggerAdapter[logging.Logger]):
    """The log ``tensorrt_llm``, with the two methods that loggers have there only."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("tensorrt_llm"))
        self._said: set[object] = set()

    def set_level(self, name: str) -> None:
        """Shows messages from the level `name` on: ``"verbose"``, ``"info"``, ``"error"`` …."""
        level = {"verbose": "DEBUG", "internal_error": "CRITICAL"}.get(name, name.upper())
        self.setLevel(level)

    def info_once(self, message: str, *, key: object = None) -> None:
        """Logs a message if its `key` (or itself) was not logged before."""
        self._once(logging.INFO, message, key)

    def warning_once(self, message: str, *, key: object = None) -> None:
        """Logs a warning if its `key` (or itself) was not logged before."""
        self._once(logging.WARNING, message, key)

    def _once(self, level: int, message: str, key: object) -> None:
        key = message if key is None else key
        if key not in self._said:
            self._said.add(key)
            self.log(level, message)


logger = Logger()
