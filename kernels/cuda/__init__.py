"""The ops on a CUDA device: the choice of a route for a copy, and the code that runs it.

Imports the vocabulary, `kvconnect.kernels.blocks` and the rooms in it: `compile` (sources to
machine code), above it `driver` (the device), above that `launch` (work as kernels). Begin with
`device` (the entry of all work), then `routes` (the routes of a copy).
"""
