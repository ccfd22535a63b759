"""``s3:``: blocks in a bucket of any S3-compatible service.

Imports the vocabulary, ``url`` and ``lanes``; never another store, nor what stands
around one. Begin with `settings` (what the URL says) and `store` (the `Backend`
methods), then `find`, `load`, `save`, `format` (index records) and `bucket` (the requests).
"""

from __future__ import annotations

from kvconnect.backends.s3.store import S3Backend, from_url

__all__ = ["S3Backend", "from_url"]
