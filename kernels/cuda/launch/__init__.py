"""Work as kernel launches.

Imports `kvconnect.kernels.blocks` and, of what stands beside it, `driver` and `compile`. Begin with
`launcher` (rows of bytes, grids, ids), then `runs` (copies of blocks).
"""
