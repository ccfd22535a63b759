"""The built-in pair: drives any `Backend` through the public connector API.

Imports the contract beside it, `kvconnect.backends`, `kvconnect.kernels` and the vocabulary; never
the runtime. Begin with `scheduler` (leader: what to load and save) and `messages` (what it tells
the workers), then `worker` (every rank), `save_queue`, `background_loads` and `step_load`.
"""
