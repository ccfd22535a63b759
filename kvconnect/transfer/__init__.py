"""Peer to peer: reads from the memory of another process, and what two processes agree on for it.

Imports the vocabulary only: it knows no cache, no store and no connector. Begin with `transport`
(the interface), `reads` (what is read) and `pull` (a read that is under way). `tcp` and `nixl` are
its two implementations, of which `choose` makes one; `regions`, `local` and `deadlines` are what
they share. `quarantine` keeps the destinations of reads that failed and may still be written to.

`control` is the channel beside the bytes, `leases` says how long they may be read; neither knows a
transport. `claims` asks peers for leases and keeps them, each one `claimed`; `peers` keeps the
connections to those that are read from. `secret` is what instances share, `local_secret` that of
one user's on one machine, and `seal` makes the codes by which both sides see that a message is
unchanged.
"""
