"""The ``.cu`` sources, and their compilation to machine code: NVRTC, and a cache on disk.

Imports no other module of kvconnect. Begin with `sources`.
"""
