"""What is to be copied: paged memory, block ids and byte runs, checked before anything moves.

Imports `kvconnect.errors` and `kvconnect.layout` only. Begin with `paged` (a cache however an
engine lays it out), then `moves` (which block goes where), `strips` and `runs` (which bytes) and
`work` (what a device is handed).
"""
