"""OpenAI's API as data: what a request may say, and the objects that answer it.

May import the engine's public side (`LLM`, handles, outputs) and the vocabulary; knows no HTTP, no
admission and no other room of the server. Begin with `generation_request` (what both kinds share),
then read a kind from its request to its answer: `completion_request` → `completion_answer`,
`chat_request` → `chat_answer`.
"""
