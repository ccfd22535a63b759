"""Whether a prompt fits, and how a new sequence gets its blocks.

Imports the rooms of sequences, pools and the tree. Begin with `planner` (changes nothing), then
`admission` (carries the plan out).
"""
