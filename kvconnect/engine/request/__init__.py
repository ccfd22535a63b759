"""A request from prompt to output: intake, tokens, stops, and the handle its submitter holds.

Imports the vocabulary, `kvconnect.engine.sampling.drafts`, and `model` for what it says of
positions; never the engine or its thread. Begin with `intake`, then `live_request` (what the engine
knows of a request) and `handle` (what its submitter holds).
"""
