"""The control channel: the messages about a transfer that two instances exchange.

Each pair has one TCP connection. It carries length-prefixed MessagePack with a schema. The
connection opens with a version and, if there is a shared secret, with a mutual proof of it. A
heartbeat detects a dead or frozen peer. Every later message has a code (see
`kvconnect.transfer.seal`): a message that is changed, repeated, missing or of another connection
closes the channel. With a secret only the two sides can make the codes; without one the codes show
damage only. Nothing is encrypted.

Imports the vocabulary, and of the room above `acceptor`, `secret` and `seal`. Begin with `messages`
(which are made of `fields`, and begin with a `description` of each side) and `channel` (an open
connection). `handshake` opens a connection; `listener` and `peer` are its two ends. `wire` makes
frames of a message's bytes. `endpoint` has a process's settings and the events that it receives.
`keyed` has the messages for reads of blocks by key.
"""
