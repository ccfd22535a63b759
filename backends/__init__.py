"""The stores of KV blocks; `open_backend` opens any of them by URL.

The modules import torch only when a value is moved: that import takes longer than listing a store.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvconnect.backends.guard.store import GuardedBackend
    from kvconnect.backends.registry import open_backend
    from kvconnect.backends.url import StoreUrl

__all__ = ["GuardedBackend", "StoreUrl", "open_backend"]

_MODULES = {"GuardedBackend": "guard.store", "StoreUrl": "url", "open_backend": "registry"}


def __getattr__(name: str) -> Any:
    # Only users import these names; the modules here import each other.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found  # later lookups do not call this function
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
