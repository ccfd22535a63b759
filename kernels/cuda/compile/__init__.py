"""The ``.cu`` sources, and their compilation to machine code: NVRTC, and a cache on disk.

Imports nothing of ours. Begin with `sources`.
"""
