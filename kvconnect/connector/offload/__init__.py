"""The built-in pair: drives any `Backend` through the public connector API.

Imports the contract beside it, `kvconnect.backends`, `kvconnect.kernels` and the vocabulary; never
the runtime. Begin with `scheduler` (leader: what to load and save) and, under it, `lookup` and
`save_plan`; `messages` (what they tell each other); then `worker` (every rank). A rank's blocks go
by `store` and `staging`: `save_queue`, `background_load`; `head_reader` reads what another tensor
parallelism saved.
"""

from __future__ import annotations

from kvconnect.connector.offload.scheduler import OffloadScheduler
from kvconnect.connector.offload.worker import OffloadWorker

__all__ = ["OffloadScheduler", "OffloadWorker"]
