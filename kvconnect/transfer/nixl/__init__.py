"""`NixlTransport`: NIXL's UCX backend, so RDMA, shared memory (CMA) or TCP, whatever UCX finds.

Imports the modules of the room above and the vocabulary; ``nixl`` itself only when a transport is
opened. Begin with `transport`; then `agent_thread` (the one thread that makes every call of an
agent, and its polling), `transfers` (a pull cut up), `nixl_pull` and `pull_part` (what one agent
reads of it, or two side by side), `agent` (the calls themselves) and `library` (finding NIXL, and
what this machine's UCX can do).
"""

from __future__ import annotations

from kvconnect.transfer.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
