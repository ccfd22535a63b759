"""The built-in pair: drives any `Backend` through the public connector API.

Imports the contract beside it, `kvconnect.backends`, `kvconnect.kernels` and the vocabulary; never
the runtime. Begin with `scheduler` (leader: what to load and save) and `messages` (what they tell
each other), then `worker` (every rank) and, along a block's `route`, `save_queue`,
`background_load` and `step_load`.
"""

from __future__ import annotations

from kvconnect.connector.offload.scheduler import OffloadScheduler
from kvconnect.connector.offload.worker import OffloadWorker

__all__ = ["OffloadScheduler", "OffloadWorker"]
