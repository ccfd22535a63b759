"""The verbs on stored prompts: warm, drop, export, import, pin, unpin and prefetch.

All but `warm` work on the frames of a store, without an engine: they need the model's tokenizer at
most. Imports the backends' registry and guard, the identity of models, the engine's prompts, and
for `warm` the engine. Begin with `prompt_store` (the verbs in Python); then `which` (the choice of
blocks, as callers and as verbs give it), `choice` (finds them in a store) and a module per verb.
`visit` and `frame_reader` serve every command that reads a store.
"""
