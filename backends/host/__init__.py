"""Blocks in one region of this process's memory: what ``memory:`` and ``nixl:`` are made of.

Imports the vocabulary, ``url``, ``lanes`` and ``entries``; no store. Begin with `blocks` (values
in, out and dropped), then `index` (which blocks there are, and which goes first), `region` (where
their bytes are), `copier` and `fused_copy` (how they move).
"""
