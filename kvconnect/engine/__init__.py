"""A small, complete engine: Hugging Face causal LMs on a paged KV cache, with connectors."""
