"""Finds the directories of models, loads them with digest and tokenizer, writes random ones.

Imports the vocabulary, and of the engine `model` and the tokenizer of `request`. Begin with
`loading`, then `hub_cache` (from a name to a directory). `random_model` makes models
for tests and demonstrations, with a tokenizer of bytes.
"""
