"""Servers that benchmarks start, and let die: a redis-server and a plain S3 server.

Part of a checkout, not of the wheel (`kvconnect.bench.checkout`). Imports the vocabulary and the
kit's proxy. Begin with `mortal`.
"""
