"""``tiered:``: several stores as one, the fastest first.

Imports the vocabulary, ``url`` and `kvconnect.backends.guard`, which stands around each tier; opens
tiers through `kvconnect.backends.registry` and knows none of them by name. Read from the top:
`settings` (what the URL says), `store` (the `Backend` methods, and what the whole promises), `find`
and `load` (what they do), `tier` (one store, skipped while it does not answer), `backlog` (what is
written to it in the background).
"""

from __future__ import annotations

from kvconnect.backends.tiered.store import TieredBackend, from_url

__all__ = ["TieredBackend", "from_url"]
