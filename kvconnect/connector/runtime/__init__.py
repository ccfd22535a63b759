"""What calls a connector, in the order its contract promises, and trusts nothing it answers.

Imports the contract beside it, `kvconnect.cache.resource_manager` and the vocabulary; never the
built-in pairs. Begin with `manager`, then `steps` (what the ranks exchange), `ledger`
(which transfers are in flight), `load_admission` and `save_admission` (which begin) and
`quarantine`.
"""
