"""The interface of a device for the kernels, and a CUDA device that implements it.

Imports `kvconnect.kernels.blocks` and, of its neighbours, `compile`. Begin with `interface`, which
tests implement, too.
"""
