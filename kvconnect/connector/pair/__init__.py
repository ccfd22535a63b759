"""The built-in pair: drives any `Backend`, and transfers between engines, through the public API.

Imports the contract beside it, `kvconnect.connector.io`, `kvconnect.connector.disagg` and the
vocabulary; never the runtime. Begin with `scheduler` (leader) and, under it, `finding` (what to
load from the store) and `save_plan` (what to save); `messages` (between the two); then `worker`
(every rank). A prompt is loaded from the first of the scheduler's sources that has it.
"""
