"""``memory:``: blocks in host memory, the fastest store and the model for the others.

Imports the vocabulary, ``url`` and ``lanes``; never another store, nor what stands
around one. Begin with `store`, then `index` (which blocks there are), `region`
(where their bytes are) and `copier` (how they move).
"""

from __future__ import annotations

from kvconnect.backends.memory.store import MemoryBackend, from_url

__all__ = ["MemoryBackend", "from_url"]
