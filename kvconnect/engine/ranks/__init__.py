"""Runs one engine on several tensor-parallel ranks: a leader that decides, followers that compute.

The leader has scheduler, block manager, sampler, and all requests. Each step it sends the followers
their part of the computation, in the same blocks: the copies that the block manager
ordered, tokens and block tables, and instructions for the connector's worker. Imports the
connector, `engine.model`, `engine.checkpoint`, `engine.attachment` and the memory of the cache.
Begin with `messages` (the messages), then `leader` and `follower`; `launch` starts processes, and
`group` connects them.
"""
