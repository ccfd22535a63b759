"""A Hugging Face causal LM on a paged KV cache.

Imports the vocabulary and `kvconnect.kernels`. Begin with `model`, then `seam` (where transformers
calls us), `forward_step`, `attention` and `pages`.
"""
