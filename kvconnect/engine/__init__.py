"""A small, complete engine: Hugging Face causal LMs on a paged KV cache, with connectors.

Imports the connector and the cache manager's interface, never a store (`kvconnect.backends`). Begin
with `llm` and `generation` (what users call), then `options` and `assembly` (what an engine is made
of), `thread` and `engine` (the path of a request through one step), `scheduler`, `sampling`. Below
them are `request` (a request from prompt to output) and `model` (the forward pass), which import
none of these except drafts. `checkpoint` loads a model from its directory, `ranks` divides an
engine among processes.
"""
