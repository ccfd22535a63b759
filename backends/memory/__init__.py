"""The ``memory:`` backend: blocks in host memory, the fastest store and the model for the others.

Imports the vocabulary, ``url``, ``lanes`` and ``host``, which does the work; never another store,
nor the guard. There is only `store`.
"""

from __future__ import annotations

from kvconnect.backends.memory.store import MemoryBackend, from_url

__all__ = ["MemoryBackend", "from_url"]
