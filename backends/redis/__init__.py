"""The ``redis:`` backends: blocks in a Redis server or cluster, shared by many processes.

Imports the vocabulary, ``url``, ``lanes`` and ``entries``; never another store, nor the guard. Read
from the top: `settings` (the parameters of the URL), `store` (the `Backend` methods), `find`,
`load` and `save` (their implementations), `format` (values and names), `client` (one server's
connections and threads) and `errors`. The rest is specific to Redis: `router` (sends each key to
its server), `topology` (which servers there are), `server` (commands about a whole server),
`commands` (commands about one key), `wire` (the bytes on a socket).
"""

from __future__ import annotations

from kvconnect.backends.redis.store import RedisBackend, from_url

__all__ = ["RedisBackend", "from_url"]
