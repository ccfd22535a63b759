"""The blocks in one region of this process's memory, which ``memory:`` and ``nixl:`` share.

Imports the vocabulary, ``url``, ``lanes`` and ``entries``; no store. Begin with `blocks` (values
in, out and dropped), then `index` (which blocks there are, and the order of eviction), `region`
(where their bytes are), `copier` and `fused_copy` (how they move).
"""
