"""The reads from another process's memory, and the messages that two processes exchange for them.

Imports only the vocabulary: no cache, store or connector. Begin with `transport` (the interface),
`reads` (the pieces to read) and `pull` (a read that is under way). `tcp` and `nixl` implement the
interface. Both use `regions` and `local`. `quarantine` keeps the destinations of failed reads that
may still be written to.

`control` is the channel for messages about a transfer. `leases` decides how long bytes may be read.
Neither imports a transport. `claims` asks peers for leases and renews them; `claimed` is one claim.
`peers` keeps the connections to the peers that this process reads from. `node` makes the transport
and holds all of it for one process. `acceptor` accepts connections of both kinds, those of
`control` and those of `tcp`, and decides which one gives way when there are too many.

`secret` is shared by all instances, `local_secret` by the processes of one user on one machine.
`seal` makes the codes by which both sides see that a message is unchanged.
"""
