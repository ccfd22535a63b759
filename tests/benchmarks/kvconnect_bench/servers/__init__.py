"""Servers that benchmarks start and kill: a redis-server and a plain S3 server.

Imports the vocabulary and the kit's proxy. Begin with `mortal`.
"""
