"""`TcpTransport`: plain sockets, from and into registered memory without a copy.

Imports the modules of the room above and the vocabulary. Begin with `transport`; then the reading
side (`peer`: a connected peer and its lanes; `tcp_pull`: a pull and the shares that lanes take of
it), the side that is read from (`source`), and what both speak: `handshake`, `wire` (requests and
answers), `stream` (bytes between a socket and a region).
"""

from __future__ import annotations

from kvconnect.transfer.tcp.transport import TcpTransport

__all__ = ["TcpTransport"]
