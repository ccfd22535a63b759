"""The directories of models: found, loaded with digest and tokenizer, and random ones written.

Imports the vocabulary, and of the engine `model` and the tokenizer of `request`. Begin with
`loading`, then `hub_cache` (from a name to a directory). `random_model` and `byte_tokenizer` make
models for tests and demonstrations.
"""
