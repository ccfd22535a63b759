"""Decides whether a prompt fits, and gives a new sequence its blocks.

Imports `kvconnect.cache.sequence` and the rooms below it. Begin with `prompt`, then `planner`
(changes nothing) and `admission` (carries the plan out).
"""
