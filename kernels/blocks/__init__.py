"""The arguments of copies: paged memory, block ids and byte runs, checked before anything moves.

Imports `kvconnect.errors` and `kvconnect.layout` only. Begin with `paged` (a cache however an
engine lays it out), then `moves` (the source and target of each block), `strips` and `runs` (their
bytes) and `work` (the work for a device).
"""
