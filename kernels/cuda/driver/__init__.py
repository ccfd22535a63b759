"""The interface of a device for the kernels, and a CUDA device that implements it.

Imports `kvconnect.kernels.blocks` and, of its neighbours, `compile`. Begin with `interface`:
tests bring drivers of their own.
"""
