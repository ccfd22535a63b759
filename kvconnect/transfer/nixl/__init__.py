"""A transport over NIXL's UCX backend: RDMA, shared memory (CMA) or TCP, as UCX selects.

Imports the modules of the room above and the vocabulary; ``nixl`` itself only when a transport is
opened. Begin with `transport`. `agent_thread` is the one thread that makes every call of an agent,
and its polling. `transfers` cuts a pull. `nixl_pull` is the pull and its parts, of which each agent
reads one. `agent` has the calls themselves. `library` finds NIXL and reports the capabilities of
this machine's UCX.
"""

from __future__ import annotations

from kvconnect.transfer.nixl.transport import NixlTransport

__all__ = ["NixlTransport"]
