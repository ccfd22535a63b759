"""The control channel: what two instances tell each other about a transfer, beside its bytes.

One TCP connection for each pair. It carries length-prefixed MessagePack with a schema, opens with a
version and, where there is a shared secret, with a mutual proof of it, and notices a dead or frozen
peer by a heartbeat of its own. Every message behind the opening has a code (see
`kvconnect.transfer.seal`): one that is changed, repeated, left out or of another connection ends
the channel. With a secret only the two sides can make the codes; without one they show damage only.
Nothing is encrypted.

Imports the vocabulary, and of the room above `secret` and `seal`. Begin with `messages` (what is
said; of `fields`, and first a `description` of each side) and `channel` (a connection that is
open). `handshake` opens one; `listener` and `peer` are its two ends; `packing` and `wire` make
bytes and frames of a message; `events` is how what comes in reaches another thread. `keyed` are the
messages of those that read blocks by key, `digests` those that compare what was read.
"""
