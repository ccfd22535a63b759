"""A storage backend of SGLang's HiCache (0.5.23) that keeps pages in kvconnect's stores.

``--enable-hierarchical-cache --hicache-storage-backend dynamic`` with
``--hicache-storage-backend-extra-config '{"backend_name": "kvconnect", "url": "…", "module_path":
"kvconnect.integrations.sglang", "class_name": "KvConnectStorage", "interface_v1": 1}'``.

SGLang is imported when the class is looked up. May import the shared core and its dependencies.
Begin with `storage`. `host_pool` reads SGLang's host memory as blocks; `settings` parses the
configuration and refuses servers; `weights` detects that weights were replaced.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvconnect.integrations.sglang.storage import KvConnectStorage

__all__ = ["KvConnectStorage"]


def __getattr__(name: str) -> Any:
    if name == "KvConnectStorage":
        from kvconnect.integrations.sglang.storage import KvConnectStorage

        return KvConnectStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
