"""A transport over plain sockets, from and into registered memory without a copy.

Imports the modules of the room above and the vocabulary. Begin with `transport`. The reading side
is `peer` (a connected peer and its lanes) and `tcp_pull` (a pull and the shares that lanes read).
The side that is read from is `source`. Both use `handshake`, `wire` (requests and answers) and
`stream` (bytes between a socket and a region).
"""

from __future__ import annotations

from kvconnect.transfer.tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
