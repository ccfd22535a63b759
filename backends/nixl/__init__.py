"""``nixl:``: instances publish the blocks they saved, and load each other's by key.

What is saved is copied into a region of this process's memory, which peers read with NIXL, or over
TCP; what this process has not is looked for at its peers. Memory is bounded, and what a peer reads
stays until its lease ends.

Imports the vocabulary, ``url``, ``lanes``, ``entries``, ``host`` (the region) and
`kvconnect.transfer`; never another store, nor what stands around one. Read from the top: `settings`
(what the URL says), `store` (the `Backend` methods), `find` and `load` (what they do), `fetch` (one
load from one peer) with `pieces` (what is read), `staging` (where to) and `pulls` (how). `publish`
is the other side: what peers are told. `node` opens and closes all of it, `directory` says
which peers there are.
"""

from __future__ import annotations

from kvconnect.backends.nixl.store import NixlBackend, from_url

__all__ = ["NixlBackend", "from_url"]
