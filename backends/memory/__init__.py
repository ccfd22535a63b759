"""``memory:``: blocks in host memory, the fastest store and the model for the others.

Imports the vocabulary, ``url``, ``lanes`` and what `kvconnect.backends.guard` lets a store say of
itself; never another store. Begin with `store`, then `index` (which blocks there are), `region`
(where their bytes are) and `copier` (how they move).
"""

from __future__ import annotations

from kvconnect.backends.memory.store import MemoryBackend, from_url

__all__ = ["MemoryBackend", "from_url"]
