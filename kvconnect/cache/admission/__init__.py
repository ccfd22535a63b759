"""Whether a prompt fits, and how a new sequence gets its blocks.

Imports `kvconnect.cache.sequence` and what is below it. Begin with `prompt`, then `planner`
(changes nothing) and `admission` (carries the plan out).
"""
