"""The tensors of pools: their size, their place on a device, and the copies between them.

Imports `kvconnect.kernels` and the vocabulary; knows neither tree nor sequences. Begin with
`sizing` and `pool_tensor`, then `copier`.
"""
