"""The ops on a CUDA device: routes, launches, copy engines, streams.

Imports `kvconnect.kernels.blocks` and `kvconnect.kernels.cuda.compile`. Begin with `device` (work
comes in), then `routes` (which way it takes), `launch` and `dma`; `driver` is what tests replace.
"""
