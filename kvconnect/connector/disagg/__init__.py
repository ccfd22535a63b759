"""Prefill in one engine, decode in another: the transfer pair.

Imports the contract beside it, `kvconnect.transfer`, the store's pair in `offload` and the
vocabulary; never the runtime. Begin with `scheduler` (leader) and its two books, `prefill` and
`decode`; `params` is what a router carries, `messages` what leader and workers tell each other.
Then `worker` (every rank): `publisher` hands out what a step computes, with `offers`; what others
hand out is read by the room `fetch`.
`node` is what both halves share in a process. `connectors` are the pair's public names, by role.
"""

from __future__ import annotations

from kvconnect.connector.disagg.connectors import DecodeConnector, PrefillConnector
from kvconnect.connector.disagg.scheduler import DisaggScheduler
from kvconnect.connector.disagg.worker import DisaggWorker

__all__ = ["DecodeConnector", "DisaggScheduler", "DisaggWorker", "PrefillConnector"]
