"""The HTTP server over one engine: OpenAI's API, health and metrics.

May import the engine's public side (`LLM`, handles, outputs) and nothing below it. Begin with `run`
and `app` (what is answered), then follow a request: `http` (the process, connections, bodies) →
`endpoint` → `openai` (the body as a request) → `trust` (whether it may be a router's) →
`generation` → `openai` (outputs as an answer). Errors of all of them become an answer in `errors`;
what takes long is done in `threads`.
`route` is another server, in front of such as this one.
"""
