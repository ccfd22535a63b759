"""Measures what clients of a server wait for: ``kvconnect bench serve``. Begin with `run`."""
