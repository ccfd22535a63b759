"""The events of the servers behind the router, followed while they are up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx2
import jiter

from kvconnect.address import is_loopback
from kvconnect.server.route.instance import Instance
from kvconnect.trace import warn_once

_ANY_ADDRESS = frozenset({"0.0.0.0", "::", "*"})  # noqa: S104  a publisher says so of itself


@dataclass(frozen=True, slots=True)
class _Following:
    publisher: str
    task: asyncio.Task[None]


class FollowedEvents:
    """Follows the publishers that servers name in ``/health``; used by the event loop's thread.

    Args:
        limit: the most blocks recorded for one server.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._following: dict[Instance, _Following] = {}

    def told(self, instance: Instance, health: httpx2.Response) -> None:
        """Follows the publisher named in the answer `health` of `instance`, if it has changed.

        The blocks recorded for an earlier publisher are removed, because its cache is lost.
        """
        address = _address(health)
        now = self._following.get(instance)
        publisher = None if address is None else address["publisher"]
        if now is not None:
            if now.publisher == publisher and not now.task.done():
                return
            self.lost(instance)
        if address is None:
            return
        try:
            from kvconnect.events.held import HeldBlocks
            from kvconnect.events.subscriber import follow
        except ModuleNotFoundError as error:
            warn_once(
                "events.extra",
                f"servers publish events, and '{error.name}' is not here to follow them: "
                "pip install 'kvconnect[events]'",
            )
            return
        endpoint = _reached(instance.url, address["endpoint"])
        replay = _reached(instance.url, address["replay_endpoint"])
        if endpoint is None or replay is None:
            warn_once(
                f"events {instance.url}",
                f"{instance.name} ({instance.url}) publishes events to its own machine only",
            )
            return
        held = HeldBlocks(self._limit)
        task = asyncio.create_task(follow(endpoint, replay, address["topic"], held))
        task.add_done_callback(_ended)
        self._following[instance] = _Following(address["publisher"], task)
        instance.held = held

    def lost(self, instance: Instance) -> None:
        """Stops following `instance`, which is down. Idempotent."""
        instance.held = None
        if (now := self._following.pop(instance, None)) is not None:
            now.task.cancel()

    async def close(self) -> None:
        """Stops following all; returns once their sockets are closed."""
        tasks = [now.task for now in self._following.values()]
        for instance in list(self._following):
            self.lost(instance)
        await asyncio.gather(*tasks, return_exceptions=True)


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        warn_once("events.follow", f"events cannot be followed: {error!r}")


def _address(health: httpx2.Response) -> Mapping[str, str] | None:
    try:
        content: Any = jiter.from_json(health.content)
    except ValueError:
        return None
    found = content.get("events") if isinstance(content, dict) else None
    if not isinstance(found, dict):
        return None
    names = ("publisher", "endpoint", "replay_endpoint", "topic")
    if not all(isinstance(found.get(name), str) for name in names):
        return None
    return found


def _reached(url: str, endpoint: str) -> str | None:
    """Returns the address of `endpoint` of the server at `url` for this router, or ``None``."""
    server = urlsplit(url).hostname or ""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    plain = host.strip("[]")
    if plain in _ANY_ADDRESS:
        plain = server
    elif is_loopback(plain) and not is_loopback(server):
        return None
    return f"tcp://[{plain}]:{port}" if ":" in plain else f"tcp://{plain}:{port}"
