"""``kvconnect bench serve``: what clients of a server wait for. Begin with `run`."""
