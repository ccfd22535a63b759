"""The built-in pair: drives any `Backend` through the public connector API.

Imports the contract beside it, `kvconnect.connector.io` and the vocabulary; never the runtime.
Begin with `scheduler` (leader: what to load and save) and, under it, `save_plan`; `messages`
(between the two); then `worker` (every rank).
"""
