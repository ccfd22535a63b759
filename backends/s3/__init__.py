"""``s3:``: blocks in a bucket of any S3-compatible service.

Imports the vocabulary, ``url``, ``lanes`` and ``entries``; never another store, nor what stands
around one. Read from the top: `settings` (what the URL says), `store` (the `Backend` methods),
`find`, `load`, `save` and `children` (what they do), `format` (index records), `client` (signed
requests, tried again) and `errors`. Then what is S3's own: `answers` (what an object says of a
block, remembered), `bucket` (the requests that are made), `transport` and `connections` (HTTP).
"""

from __future__ import annotations

from kvconnect.backends.s3.store import S3Backend, from_url

__all__ = ["S3Backend", "from_url"]
