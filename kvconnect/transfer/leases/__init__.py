"""How long a peer's blocks may be read: both sides' rules, and the messages that carry them.

P pins blocks for a time, D counts that time on its own clock from when it *sent* what P
acknowledged, so D's end comes before P's whatever the network did. What was read after that is
discarded. No module here touches a block manager: what is not pinned any more is handed to a
callable.

Imports `messages` and `fields` of `kvconnect.transfer.control`, and the vocabulary. Begin with
`table` (P's rules) and `held` (D's); `server` (with `let_go`) answers the messages, which
`kvconnect.transfer.claims` sends; `timer` is the thread of each.
"""
