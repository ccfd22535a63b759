"""Servers that benchmarks start, and let die: a redis-server and a plain S3 server.

Imports the vocabulary and the kit's proxy. Begin with `mortal`.
"""
