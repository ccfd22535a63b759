"""The HTTP server over one engine: OpenAI's API, health and metrics.

May import the engine's public side (`LLM`, handles, outputs) and nothing below it. Begin with `run`
and `app` (the paths), then follow a request: `http` (the process, connections, bodies) → `endpoint`
→ `openai` (the body as a request) → `trust` (checks that a router sent it) → `endpoint` (its
generation) → `openai` (outputs as an answer). `errors` turns all errors into answers; long work
runs in `threads`. `route` is another server, a router in front of several servers.
"""
