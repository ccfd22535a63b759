"""The HTTP side that both servers share: process, connections, bodies and limits.

Used by both servers, the engine's and the router's; imports neither, nor an engine. Begin with
`http_server` (life of the process); then `gate` → `body`, and `connection`, `disconnect`.
"""
