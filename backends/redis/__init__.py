"""``redis:`` and its kin: blocks in a Redis server or cluster, shared by many processes.

Imports the vocabulary, ``url`` and ``lanes``; never another store, nor what stands
around one. Begin with `settings` (what the URL says) and `store` (the `Backend`
methods), then `find` and `save`, `format` (what is stored under which name), `router` (which server
gets what) and `wire` (the bytes on a socket).
"""

from __future__ import annotations

from kvconnect.backends.redis.store import RedisBackend, from_url

__all__ = ["RedisBackend", "from_url"]
