"""The ``s3:`` backend: blocks in a bucket of any S3-compatible service.

Imports the vocabulary, ``url``, ``lanes`` and ``entries``; never another store, nor the guard. Read
from the top: `settings` (the parameters of the URL), `store` (the `Backend` methods), `find`,
`load`, `save` and `children` (their implementations), `format` (index records), `client` (signed
requests and retries) and `errors`. The rest is specific to S3: `answers` (the cached state of
blocks), `bucket` (the requests that are made), `transport` and `connections` (HTTP).
"""

from __future__ import annotations

from kvconnect.backends.s3.store import S3Backend, from_url

__all__ = ["S3Backend", "from_url"]
