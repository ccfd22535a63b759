"""Checks repeatedly whether each server accepts requests."""

from __future__ import annotations

import asyncio

import httpx2

from kvconnect.server.route.client import InstanceClient
from kvconnect.server.route.fleet import Fleet
from kvconnect.server.route.followed_events import FollowedEvents
from kvconnect.server.route.instance import Instance

__all__ = ["ask_all", "watch"]


async def ask_all(fleet: Fleet, client: InstanceClient, events: FollowedEvents) -> None:
    """Checks each server once, within ``health_timeout_s``."""
    await asyncio.gather(*(_ask(one, client, events) for one in fleet))


async def watch(
    fleet: Fleet, client: InstanceClient, events: FollowedEvents, interval_s: float
) -> None:
    """Checks each server every `interval_s`; follows the events of those up.

    Runs until cancelled.
    """
    await asyncio.gather(*(_watch(one, client, events, interval_s) for one in fleet))


async def _watch(
    instance: Instance, client: InstanceClient, events: FollowedEvents, interval_s: float
) -> None:
    while True:
        await asyncio.sleep(interval_s)
        await _ask(instance, client, events)


async def _ask(instance: Instance, client: InstanceClient, events: FollowedEvents) -> None:
    try:
        answer = await client.get(instance, "/health")
    except (httpx2.HTTPError, TimeoutError) as error:
        instance.went_down(f"/health: {type(error).__name__}")
        events.lost(instance)
        return
    if answer.status_code == httpx2.codes.OK:
        instance.came_up()
        events.told(instance, answer)
    else:
        events.lost(instance)
        instance.drains(f"/health: status {answer.status_code}")
