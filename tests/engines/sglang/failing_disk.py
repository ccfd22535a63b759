"""``faulty:///path``: a disk store that does what a test wants; see `FaultyBackend`."""

from __future__ import annotations

from kvconnect.backends.disk import from_url as disk
from kvconnect.backends.url import StoreUrl
from kvconnect.testing.faults.faulty_backend import FaultyBackend

stores: list[FaultyBackend] = []
"""Those of this process, the newest last."""


def from_url(url: StoreUrl) -> FaultyBackend:
    stores.append(FaultyBackend(disk(StoreUrl.parse(str(url).replace("faulty:", "disk:", 1)))))
    return stores[-1]
