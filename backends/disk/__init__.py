"""``disk:``: blocks in large files on a local disk, there again after a restart.

Imports the vocabulary, ``url`` and ``lanes``; never another store, nor what stands around one.
Begin with `settings` (what the URL says) and `store` (the `Backend` methods), then `find`, `load`
and `save`, `format` (the index as a SQLite database), `client` and `directory` (what is open, and
when it is opened anew). `writer` and `slots` change the index, `segments` are the data files.
"""

from __future__ import annotations

from kvconnect.backends.disk.store import DiskBackend, from_url

__all__ = ["DiskBackend", "from_url"]
