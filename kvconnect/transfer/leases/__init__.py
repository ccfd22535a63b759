"""The leases: how long a peer's blocks may be read, and the messages for that.

P is the process that has the blocks (prefill), D the process that reads them (decode). P pins
blocks for a time. D counts that time on its own clock, from when it *sent* the message that P
acknowledged. So D's end comes before P's, whatever the network did. Bytes read after D's end are
discarded. No module here touches a block manager: leases that ended are passed to a callable.

Imports `messages` and `fields` of `kvconnect.transfer.control`, and the vocabulary. Begin with
`table` (P's rules, of each `lease`) and `held` (D's). `server` answers the messages that
`kvconnect.transfer.claims` sends. `timer` has the clock and the thread of each.
"""
