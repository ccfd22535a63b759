"""The servers behind the router, and the choice of one for a request."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from kvconnect.server.route.client import InstanceClient
from kvconnect.server.route.followed_events import FollowedEvents
from kvconnect.server.route.instance import Instance, Role
from kvconnect.server.route.prompt import Prompt
from kvconnect.server.route.settings import RouteSettings
from kvconnect.trace import count

_REQUEST = {"prefill": 1, "decode": 16}
"""The load of a request besides its prompt, in pieces, for its generation."""

_SLACK = {"prefill": 32, "decode": 0}
"""The load above that of the least loaded server, in pieces, up to which held prefixes decide.

On another server a prefix is computed again, and evicts other blocks."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The server that gets a request.

    Attributes:
        instance: the server.
        load: the load that the request adds to the server.
        holds: true if the server has computed all full pieces of the prompt, at least one.
    """

    instance: Instance
    load: int
    holds: bool


class Fleet:
    """The servers, and how they are asked; used by the event loop's thread only.

    Attributes:
        settings: of the router.
        client: sends requests to the servers.
        events: follows the events of those up.
        prefill, decode: by role, in the order of the settings.
    """

    def __init__(self, settings: RouteSettings) -> None:
        self.settings = settings
        self.client = InstanceClient(settings)
        self.events = FollowedEvents(settings.max_prefixes)
        self.prefill = _instances("prefill", settings.prefill, settings)
        self.decode = _instances("decode", settings.decode, settings)
        self._choices = itertools.count(1)

    def __iter__(self) -> Iterator[Instance]:
        return itertools.chain(self.prefill, self.decode)

    def choose(self, role: Role, prompt: Prompt, but: Collection[Instance]) -> Choice | None:
        """Returns the server of `role` that will compute `prompt` first; ``None`` if none is up.

        That is the server with the least of `prompt` to compute beyond the prefix that it holds,
        unless its load is much higher than that of others. Ties are broken by the lowest load, then
        by the longest time since the last choice.

        A chosen server counts as holding `prompt`, so that later requests with that prefix go to
        it: a server without events permanently, one with events while the request runs.
        """
        servers = self.prefill if role == "prefill" else self.decode
        able = [one for one in servers if one.down is None and one not in but]
        if not able:
            return None
        held = {one: one.pieces_of(prompt) for one in able}
        loads = {one: _REQUEST[role] + prompt.num_pieces - held[one] for one in able}
        idlest = min(one.load for one in able)
        most = idlest + _SLACK[role]
        chosen = min(
            able, key=lambda one: (loads[one] + max(0, one.load - most), one.load, one.chosen)
        )
        chosen.chosen = next(self._choices)
        chosen.prefixes.add(prompt.prefixes)
        count(f"route.{role}.chosen", pieces=prompt.num_pieces, held_pieces=held[chosen])
        holds = bool(held[chosen]) and held[chosen] == len(prompt.prefixes)
        return Choice(chosen, loads[chosen], holds)

    async def close(self) -> None:
        """Disconnects from the servers."""
        await self.events.close()
        await self.client.close()

    def sizes(self) -> dict[str, float]:
        """Returns gauges: servers that are up or down, and running requests, by role."""
        found: dict[str, float] = {}
        for role, servers in (("prefill", self.prefill), ("decode", self.decode)):
            up = sum(one.down is None for one in servers)
            found[f"route.{role}.up"] = up
            found[f"route.{role}.down"] = len(servers) - up
            found[f"route.{role}.running"] = sum(one.running for one in servers)
        return found


def _instances(role: Role, urls: tuple[str, ...], settings: RouteSettings) -> tuple[Instance, ...]:
    return tuple(
        Instance(role, number, url, settings.max_prefixes) for number, url in enumerate(urls)
    )
