"""The loads: each piece of a run comes from this instance, or from a peer that has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvconnect.backends.host.blocks import HostBlocks
from kvconnect.backends.nixl.fetch import Fetcher
from kvconnect.backends.nixl.find import NixlFinder
from kvconnect.keys import BlockKey
from kvconnect.transfer.peers import PeerLink

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NixlReader"]


class NixlReader:
    """Loads runs of blocks. Belongs to the event loop.

    Args:
        own: the blocks of this instance.
        finder: finds the peer of a block.
        fetcher: loads blocks from peers.
    """

    def __init__(self, own: HostBlocks, finder: NixlFinder, fetcher: Fetcher) -> None:
        self._own = own
        self._finder = finder
        self._fetcher = fetcher

    async def load(self, keys: Sequence[BlockKey], into: Sequence[Tensor]) -> int:
        """Fills `into`; returns how many leading blocks are filled. See `Backend.load`."""
        loaded = 0
        failed: set[PeerLink] = set()
        while loaded < len(keys):
            loaded += await self._own.load(keys[loaded:], into[loaded:], ())
            rest = keys[loaded:]
            if not rest or self._own.present(rest[:1])[0]:
                break  # all is there, or the next is longer than its buffer
            link, known = await self._finder.run_of(rest, failed)
            if link is None:
                break
            got = await self._fetcher.fetch(link, rest[:known], into[loaded : loaded + known])
            loaded += got
            if got < known:
                failed.add(link)
                self._finder.forget(rest[got:known])
        return loaded
