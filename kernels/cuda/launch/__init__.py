"""Runs work as kernel launches.

Imports `kvconnect.kernels.blocks` and, of its neighbours, `driver` and `compile`. Begin with
`launcher` (rows of bytes, grids, ids), then `runs` (copies of blocks).
"""
