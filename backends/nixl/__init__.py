"""The ``nixl:`` backend: instances publish saved blocks, and load each other's by key.

Saved blocks are copied into a region of this process's memory, which peers read with NIXL, or over
TCP; blocks that this process does not have are looked up at its peers. Memory is bounded, and a
block that a peer reads stays until its lease ends.

Imports the vocabulary, ``url``, ``lanes``, ``entries``, ``host`` (the region) and
`kvconnect.transfer`; never another store, nor the guard. Read from the top: `settings` (the
parameters of the URL), `store` (the `Backend` methods), `find` (the search for blocks), `fetch` (a
load from one peer) with `staging` (into which memory bytes are read) and `pulls` (how). `publish`
is the other side: the answers to peers. `node` opens and closes all of it, `directory` finds the
peers.
"""

from __future__ import annotations

from kvconnect.backends.nixl.store import NixlBackend, from_url

__all__ = ["NixlBackend", "from_url"]
