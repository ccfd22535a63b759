"""The HTTP layer of both servers: process, connections, bodies and limits.

Serves the engine's server and the router; imports neither, nor an engine. Begin with `http_server`
(life of the process); then `gate` → `body`, and `connection`, `disconnect`.
"""
