"""The ``disk:`` backend: blocks in large files on a local disk, kept across restarts.

Imports the vocabulary, ``url``, ``lanes``, ``entries`` and ``quotas``; never another store, nor the
guard. Begin with `settings` (the parameters of the URL) and `store` (the `Backend` methods), then
`find`, `load` and `save`, `format` (the index as a SQLite database), `client` (when the directory
is opened, and opened again) and `errors`. The rest is specific to the disk: `directory` (what is
open), `writer`, `rows` and `slots` (changes of the index), `eviction` (whose blocks go first),
`leftovers` (bytes of dropped blocks), `path` (checks of a directory before it is opened), and the
room `files` (data files, and how every file of a store is opened).
"""

from __future__ import annotations

from kvconnect.backends.disk.store import DiskBackend, from_url

__all__ = ["DiskBackend", "from_url"]
