"""The ``.cu`` sources, and how they become machine code: NVRTC, and a cache of it on disk.

Imports nothing of ours. Begin with `sources`.
"""
