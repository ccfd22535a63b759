"""The ops on the host: fast twins of the kernels, and the plain-torch reference of all of them.

Imports `kvconnect.kernels.blocks` only. Begin with `reference`.
"""
