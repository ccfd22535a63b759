"""The search for blocks, in this instance and at its peers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import takewhile

import numpy as np

from kvconnect.backend import MAX_CHILDREN, Child
from kvconnect.backends.host.blocks import HostBlocks
from kvconnect.keys import BlockKey
from kvconnect.trace import count
from kvconnect.transfer.control.keyed import (
    MAX_KEYS,
    FindChildren,
    FindKeys,
    ForgetKeys,
    FoundChildren,
    FoundKeys,
)
from kvconnect.transfer.control.messages import Message
from kvconnect.transfer.peers import PeerLink, Peers

_REMEMBERED = 1 << 16


class NixlFinder:
    """Finds blocks in this instance and at its peers. Belongs to the event loop.

    The peer of a block that a lookup has found is cached for the load that follows. It is a hint: a
    peer that has dropped the block since then grants no read.

    Args:
        own: the blocks of this instance.
        peers: the peers that are asked.
        patience_s: seconds to wait for peers.
    """

    def __init__(self, own: HostBlocks, peers: Peers, patience_s: float) -> None:
        self._own = own
        self._peers = peers
        self._patience_s = patience_s
        self._known: OrderedDict[BlockKey, PeerLink] = OrderedDict()

    async def lookup(self, keys: Sequence[BlockKey]) -> int:
        """Returns how many leading `keys` are here or at a peer that answers in time."""
        found = 0
        for start in range(0, len(keys), MAX_KEYS):
            part = keys[start : start + MAX_KEYS]
            here = self._own.present(part)
            if not all(here):
                missing = [key for key, mine in zip(part, here, strict=True) if not mine]
                there = iter(await self._ask(missing, self._peers.ready()))
                here = [mine or next(there) is not None for mine in here]
            leading = sum(1 for _ in takewhile(bool, here))
            found += leading
            if leading < len(part):
                break
        return found

    async def run_of(
        self, keys: Sequence[BlockKey], without: Collection[PeerLink]
    ) -> tuple[PeerLink | None, int]:
        """Returns a peer that has the first of `keys`, and how many leading ones it has.

        A key in this instance ends the run; so does `MAX_KEYS`.

        Args:
            keys: the keys, the first of which is not in this instance.
            without: peers that are excluded.
        """
        keys = keys[:MAX_KEYS]
        here = self._own.present(keys)
        absent = [key for key, _ in takewhile(lambda one: not one[1], zip(keys, here, strict=True))]
        where: Sequence[PeerLink | None] = [self._known.get(key) for key in absent]
        first = where[0] if where else None
        if first is None or not first.ready or first in without:
            links = [link for link in self._peers.ready() if link not in without]
            where = await self._ask(absent, links)
            first = where[0] if where else None
        if first is None:
            return None, 0
        return first, sum(1 for _ in takewhile(lambda link: link is first, where))

    async def children(self, key: BlockKey | None) -> list[Child]:
        """Returns blocks with tokens that follow `key`, here and at peers that answer in time.

        An answer of a peer is not trusted by itself: see `Backend.children`.
        """
        found = {child.key: child for child in self._own.children(key)}
        prompt = [link for link in self._peers.ready() if not link.late]
        asked = _asked(prompt, lambda seq: FindChildren(seq=seq, parent=key))
        if asked:
            done, late = await asyncio.wait(asked, timeout=self._patience_s)
            for future in late:
                asked[future].late = True
                count("store.nixl.late")
            for future in done:
                said = None if future.cancelled() else future.result()
                for child in _children_of(said):
                    if found.setdefault(child.key, child) is child:
                        self._remember([child.key], [asked[future]])
        return list(found.values())[:MAX_CHILDREN]

    def forget(self, keys: Sequence[BlockKey]) -> None:
        """Removes the peers of `keys` from the cache."""
        for key in keys:
            self._known.pop(key, None)

    async def _ask(
        self, keys: Sequence[BlockKey], links: Sequence[PeerLink]
    ) -> Sequence[PeerLink | None]:
        """Returns for each of `keys` the first peer that has it."""
        where: list[PeerLink | None] = [None] * len(keys)
        # One open request suffices to notice that a late peer answers again.
        links = [link for link in links if not (link.late and link.answers)]
        asked = _asked(links, lambda seq: FindKeys(seq=seq, keys=tuple(keys)))
        end = asyncio.get_running_loop().time() + self._patience_s
        while asked and not all(where):
            left = end - asyncio.get_running_loop().time()
            done, waiting = await asyncio.wait(
                asked, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                for future in waiting:
                    asked[future].late = True
                    count("store.nixl.late")
                break
            for future in done:
                link = asked.pop(future)
                answer = None if future.cancelled() else future.result()
                if not isinstance(answer, FoundKeys) or len(answer.found) != len(keys):
                    continue
                for index, there in enumerate(answer.found):
                    if there and where[index] is None:
                        where[index] = link
        self._remember(keys, where)
        return where

    def _remember(self, keys: Sequence[BlockKey], where: Sequence[PeerLink | None]) -> None:
        for key, link in zip(keys, where, strict=True):
            self._known.pop(key, None)
            if link is not None:
                self._known[key] = link
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    async def forget_everywhere(self, keys: Sequence[BlockKey]) -> None:
        """Asks all peers to drop `keys`; waits for their answers, for `patience_s` at most."""
        self.forget(keys)
        asked: dict[asyncio.Future[Message], PeerLink] = {}
        for start in range(0, len(keys), MAX_KEYS):
            part = tuple(keys[start : start + MAX_KEYS])
            asked |= _asked(self._peers.ready(), partial(_forget, part))
        if asked:
            await asyncio.wait(asked, timeout=self._patience_s)


def _asked(
    links: Sequence[PeerLink], message: Callable[[int], Message]
) -> dict[asyncio.Future[Message], PeerLink]:
    """Asks each of `links`; returns the answers to wait for: those of peers that are not late."""
    asked = [(link.ask(message), link) for link in links]
    return {asyncio.wrap_future(answer): link for answer, link in asked if not link.late}


def _children_of(answer: Message | None) -> Iterator[Child]:
    if not isinstance(answer, FoundChildren):
        return
    tokens, at = np.frombuffer(answer.tokens, "<i4"), 0
    for key, length in zip(answer.keys, answer.lengths, strict=True):
        yield Child(BlockKey(key), tokens[at : at + length])
        at += length


def _forget(keys: tuple[BlockKey, ...], seq: int) -> Message:
    return ForgetKeys(seq=seq, keys=keys)
