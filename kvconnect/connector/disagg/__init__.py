"""The transfer pair: one engine prefills a prompt, another one decodes it.

Imports the contract beside it, `kvconnect.transfer`, the store's pair in `offload` and the
vocabulary; never the runtime. Begin with `scheduler` (leader) and its two books, `prefill` and
`decode`. `params` is what a router carries; `messages` are what leader and workers exchange.
Then read `worker` (every rank): `publisher` publishes what a step computes, with `offers`. The room
`fetch` reads what other engines publish. `node` is what both halves share in a process.
`connectors` are the pair's public names, by role.
"""

from __future__ import annotations

from kvconnect.connector.disagg.connectors import DecodeConnector, PrefillConnector
from kvconnect.connector.disagg.scheduler import DisaggScheduler
from kvconnect.connector.disagg.worker import DisaggWorker

__all__ = ["DecodeConnector", "DisaggScheduler", "DisaggWorker", "PrefillConnector"]
