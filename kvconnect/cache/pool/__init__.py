"""The blocks of one pool: free, held, published, reclaimed; device and host tier.

Imports `kvconnect.cache.tree` and `kvconnect.cache.memory`. Begin with `block_pool`, then
`published_blocks` and `held_blocks`. `matching` and `slabs` work on all pools together.
"""
