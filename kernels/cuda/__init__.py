"""The ops on a CUDA device: which way a copy takes, and what runs it.

Imports `kvconnect.errors`, `kvconnect.kernels.blocks` and the rooms in it: `compile` (sources to
machine code), above it `driver` (the device), above that `launch` (work as kernels). Begin with
`device` (work comes in), then `routes` (the ways of a copy).
"""
