"""The life of a request from prompt to output: intake, tokens, stops, and the submitter's handle.

Imports the vocabulary, `kvconnect.engine.sampling.drafts`, and `model` for its limits of
positions; never the engine or its thread. Begin with `intake`, then `live_request` (the engine's
view of a request) and `handle` (the submitter's).
"""
