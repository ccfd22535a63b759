"""The options of commands that publish events of their KV cache."""

from __future__ import annotations

import argparse

from kvconnect.cli.command import add_number
from kvconnect.errors import ConfigurationError
from kvconnect.events.settings import EventsConfig

__all__ = ["add_events_options", "events_of"]


def add_events_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of events."""
    group = parser.add_argument_group(
        "events",
        "Stored and removed blocks are published over ZeroMQ in vLLM's format, for routers. "
        "Messages hold the token ids of prompts, and whoever connects reads them.",
    )
    group.add_argument(
        "--events",
        metavar="URL",
        help="listen here for subscribers, for example tcp://127.0.0.1:5557 or tcp://*:5557 "
        "(default: nothing is published)",
    )
    group.add_argument(
        "--events-replay",
        metavar="URL",
        help="for requests of missed batches (default: the port after that of --events)",
    )
    group.add_argument("--events-topic", metavar="TEXT", help="of the messages (default: empty)")
    add_number(group, "--events-buffer", "newest batches that are kept for replay (default: 10000)")


def events_of(arguments: argparse.Namespace) -> EventsConfig | None:
    """Returns the settings of the events' publisher; ``None``: events are not published.

    Raises:
        ConfigurationError: an option is wrong, or needs ``--events``.
    """
    more = {
        "replay_endpoint": arguments.events_replay,
        "topic": arguments.events_topic,
        "buffer_steps": arguments.events_buffer,
    }
    given = {name: value for name, value in more.items() if value is not None}
    if arguments.events is None:
        if given:
            raise ConfigurationError(
                "--events-replay, --events-topic, --events-buffer: need --events"
            )
        return None
    return EventsConfig(endpoint=arguments.events, **given)
