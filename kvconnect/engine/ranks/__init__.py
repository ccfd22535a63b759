"""One engine on several tensor-parallel ranks: a leader that decides, followers that compute.

The leader has scheduler, block manager and sampler. Each step it tells the followers what they need
to compute their part of the model, and keep their share of the KV heads, in the same blocks: the
copies that the block manager ordered, tokens and block tables, what became of requests. Imports the
connector, `engine.model`, `engine.checkpoint`, `engine.attachment` and the memory of the cache.
Begin with `messages` (what is told), then `leader` and `follower`; `launch` starts processes, and
`group` connects them.
"""
