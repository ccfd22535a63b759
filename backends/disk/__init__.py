"""``disk:``: blocks in large files on a local disk, there again after a restart.

Imports the vocabulary, ``url`` and ``lanes``; never another store, nor what stands
around one. Begin with `settings` (what the URL says) and `store` (the `Backend`
methods), then `find` (what the index answers), `save` (what changes it) and `format` (the index as
a SQLite database); `segments` and `slots` are the data files.
"""

from __future__ import annotations

from kvconnect.backends.disk.store import DiskBackend, from_url

__all__ = ["DiskBackend", "from_url"]
