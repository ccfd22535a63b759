"""The ops on the host: fast versions for host memory, and a plain-torch reference of all ops.

Imports `kvconnect.kernels.blocks` only. Begin with `reference`.
"""
