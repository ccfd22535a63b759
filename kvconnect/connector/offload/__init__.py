"""The built-in pair by the name that configurations and subclasses know it by.

Imports `kvconnect.connector.pair` and nothing else; begin there.
"""

from __future__ import annotations

from kvconnect.connector.pair.scheduler import OffloadScheduler
from kvconnect.connector.pair.worker import OffloadWorker

__all__ = ["OffloadScheduler", "OffloadWorker"]
