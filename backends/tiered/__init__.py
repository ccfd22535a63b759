"""``tiered:``: several stores as one, the fastest first.

Imports the vocabulary, ``url`` and `kvconnect.backends.guard`, which stands around each tier; opens
tiers through `kvconnect.backends.registry` and knows none of them by name. Begin with `settings`
and `store`, then `tier`, `find` and `backlog`.
"""

from __future__ import annotations

from kvconnect.backends.tiered.store import TieredBackend, from_url

__all__ = ["TieredBackend", "from_url"]
