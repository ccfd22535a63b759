"""The ``tiered:`` backend: several stores as one, the fastest first.

Imports the vocabulary, ``url`` and `kvconnect.backends.guard`, which wraps each tier; opens tiers
through `kvconnect.backends.registry` and names none of them. Read from the top: `settings` (the
parameters of the URL), `store` (the `Backend` methods, and the capabilities of the whole), `find`
and `load` (lookups and loads), `tier` (one store, skipped while it does not answer), `backlog`
(blocks that are written to a tier in the background).
"""

from __future__ import annotations

from kvconnect.backends.tiered.store import TieredBackend, from_url

__all__ = ["TieredBackend", "from_url"]
