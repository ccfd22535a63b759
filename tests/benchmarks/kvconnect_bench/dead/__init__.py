"""Measures what a store that dies costs the requests: ``kvconnect bench dead``."""
