"""Calls a connector in the order that its contract promises, and trusts none of its answers.

The leader has all state of requests and transfers; every rank has a driver of its worker. Imports
the contract beside it, `kvconnect.cache.resource_manager` and the vocabulary; never the built-in
pairs. Begin with `manager` (the leader's) and `rank` (every rank's), then `ledger` (the transfers
in flight), `transfers` (one of them, and the outcome of a step), `admission` (which transfers
start) and `quarantine`.
"""
