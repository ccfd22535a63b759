"""The data of OpenAI's API: the fields of requests, and the objects that answer them.

May import the engine's public side (`LLM`, handles, outputs) and the vocabulary; knows no HTTP, no
admission and no other room of the server. Begin with `generation_request` (fields of both kinds),
then read a kind from its request to its answer: `completion` or `chat`.
"""
