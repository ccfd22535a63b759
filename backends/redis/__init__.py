"""``redis:`` and its kin: blocks in a Redis server or cluster, shared by many processes.

Imports the vocabulary, ``url``, ``lanes`` and ``entries``; never another store, nor what stands
around one. Read from the top: `settings` (what the URL says), `store` (the `Backend` methods),
`find`, `load` and `save` (what they do), `format` (what is stored under which name), `client` (one
server's connections and threads) and `errors`. Then what is Redis's own: `router` (which server
gets what), `topology` (which servers there are), `server` (what is asked of a whole server),
`commands` (what is asked about one key), `wire` (the bytes on a socket).
"""

from __future__ import annotations

from kvconnect.backends.redis.store import RedisBackend, from_url

__all__ = ["RedisBackend", "from_url"]
