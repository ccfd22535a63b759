"""The live sequences and pins: the blocks that they hold, and the publication of these blocks.

Imports `kvconnect.cache.pool` and `kvconnect.cache.tree`. Begin with `sequence` and
`sequence_table`.
"""
