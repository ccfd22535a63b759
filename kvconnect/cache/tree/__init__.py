"""The radix tree of published token paths.

Imports the vocabulary only. Begin with `radix_tree`, then `segment` (a run of blocks as a node,
and its state in each pool).
"""
