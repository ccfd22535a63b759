"""Tensors of pools: how large, where, and the copies between them.

Imports `kvconnect.kernels` and the vocabulary; knows neither tree nor sequences. Begin with
`sizing` and `pool_tensor`, then `copier`.
"""
