"""The block manager: which block of KV memory holds which tokens.

A room imports only from those below it, in this order: `block_manager` (and `invariants`, which
recounts its state), `admission`, `sequence`, `pool`, then `tree` and `memory`, which do not know
each other. `resource_manager` is the contract with an engine, `kv_cache_manager` fulfils it with a
block manager and its memory. Begin with `block_manager`.
"""
