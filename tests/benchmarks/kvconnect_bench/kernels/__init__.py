"""``kvconnect bench kernels``: copies of blocks, against what the machine can do."""
