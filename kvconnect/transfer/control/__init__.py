"""The control channel: what two instances tell each other about a transfer, beside its bytes.

One TCP connection for each pair. It carries length-prefixed MessagePack with a schema, opens with a
version and, where there is a shared secret, with a mutual proof of it, and notices a dead or frozen
peer by a heartbeat of its own. It authenticates the opening; it neither encrypts nor signs what
follows: across a network that others can write to, run it in a tunnel.

Imports the vocabulary and `kvconnect.transfer.secret`. Begin with `messages` (what is said; of
`fields`, and first a `description` of each side) and `channel` (a connection that is open).
`handshake` opens one; `listener` and `peer` are its two ends; `packing` and `wire` make bytes and
frames of a message; `events` is how what comes in reaches another thread. `keyed` are the messages
of those that read blocks by key.
"""
