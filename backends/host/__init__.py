"""The blocks in one region of this process's memory, which ``memory:`` and ``nixl:`` share.

Imports the vocabulary, ``url``, ``lanes`` and ``entries``; no store. Begin with `blocks` (values
copied in, copied out and dropped), then `index` (the blocks, and the order of eviction), `region`
(their memory), `copier` and `fused_copy` (the copies).
"""
