"""What the kernels need of a device, and a CUDA device that has it.

Imports `kvconnect.kernels.blocks` and, of what stands beside it, `compile`. Begin with `interface`:
tests bring drivers of their own.
"""
