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


async def load(
    own: HostBlocks,
    finder: NixlFinder,
    fetcher: Fetcher,
    keys: Sequence[BlockKey],
    into: Sequence[Tensor],
) -> int:
    """Fills `into`; returns how many leading blocks are filled. See `Backend.load`.

    Runs on the event loop.

    Args:
        own: the blocks of this instance.
        finder: finds the peer of a block.
        fetcher: loads blocks from peers.
        keys: the keys of the blocks.
        into: receives the blocks.
    """
    loaded = 0
    failed: set[PeerLink] = set()
    while loaded < len(keys):
        loaded += await own.load(keys[loaded:], into[loaded:], ())
        rest = keys[loaded:]
        if not rest or own.present(rest[:1])[0]:
            break  # all is there, or the next is longer than its buffer
        link, known = await finder.run_of(rest, failed)
        if link is None:
            break
        got = await fetcher.fetch(link, rest[:known], into[loaded : loaded + known])
        loaded += got
        if got < known:
            failed.add(link)
            finder.forget(rest[got:known])
    return loaded
