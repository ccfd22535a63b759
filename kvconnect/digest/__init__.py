"""The room of identity: the digest of a model's files, and the reasons against naming anything.

Imports the vocabulary. Only `watch` imports torch, and nothing here imports `watch`. Begin with
`model`; then `files` (which files, opened once), `content` (how they are hashed) and `cache` (what
was hashed before). `doubts` is the one table of reasons for which nothing is cached.
"""

from __future__ import annotations

from kvconnect.digest.model import model_digest

__all__ = ["model_digest"]
