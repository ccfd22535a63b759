"""The room of identity: the digest of a model's files, and the reasons for which no key is made.

Imports the vocabulary. Only `watch` imports torch, and nothing here imports `watch`. Begin with
`model`; then `files` (the model's files, opened once), `content` (their hashes) and `cache` (the
digests of earlier processes). `doubts` is the table of all reasons for which nothing is cached.
"""

from __future__ import annotations

from kvconnect.digest.model import model_digest

__all__ = ["model_digest"]
