"""The block manager against its peers: each party serves the same traffic in a process of its own.

`traffic`, `worker` and the peers' adapters also run in the peers' interpreters, where kvconnect is
not installed: they import nothing but NumPy, the standard library, and one another.
"""
