"""What stands for a model in keys: the digest of its configuration and of its weights' content.

Imports the vocabulary, no torch. Begin with `model`; then `files` (which files, opened once),
`content` (how they are hashed), `cache` (what was hashed before).
"""

from __future__ import annotations

from kvconnect.digest.model import model_digest

__all__ = ["model_digest"]
