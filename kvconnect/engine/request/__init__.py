"""A request from prompt to output: intake, tokens, stops, and the handle its submitter holds.

Imports the vocabulary and what the model says of positions; never the engine's thread. Begin with
`intake`, then `live_request` and `handle`.
"""
