"""The live sequences and pins: the blocks they hold, and when those are published.

Imports `kvconnect.cache.pool` and `kvconnect.cache.tree`. Begin with `sequence` and
`sequence_table`.
"""
