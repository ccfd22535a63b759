"""A Hugging Face causal LM on a paged KV cache.

Imports the vocabulary, `kvconnect.kernels` and the interface of cache managers; nothing else of the
engine. Begin with `model`, then `seam` (where transformers calls us), `forward_step`, `attention`
and `pages`; for recurrent layers `mixers`, `states` and `drafted`; for models without an attention
interface `own_attention`.
"""
