"""The verbs on stored prompts: drop, export, import, pin and unpin.

A verb works on the frames of a store, without an engine: it needs the model's tokenizer at most.
Imports the backends' registry and guard, the identity of models, and the prompts of the engine.
Begin with `prompt_store` (the verbs in Python); then `wanted` (which blocks are meant), `choice`
(finding them in a store) and a module per verb. `visit`, `listing` and `frame_reader` serve every
command that reads a store.
"""
