"""Stores of KV blocks: `memory:` and `disk:`; `open_backend` opens any of them by URL."""

from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.registry import open_backend
from kvconnect.backends.url import StoreUrl

__all__ = ["GuardedBackend", "StoreUrl", "open_backend"]
