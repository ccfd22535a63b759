"""The command ``kvconnect route``: a router in front of prefill and decode servers."""

from __future__ import annotations

import argparse
import os
from contextlib import closing, nullcontext
from functools import partial

from kvconnect.cli.command import add_duration, add_number, picked
from kvconnect.cli.options.config_file import add_config
from kvconnect.cli.options.http_options import (
    ROUTER_SECRET,
    add_http_options,
    http_fields,
    tell_url,
    traces_of,
)

_INSTANCE_API_KEY = "KVCONNECT_INSTANCE_API_KEY"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``route``."""
    parser.description = (
        "Answer as `kvconnect serve` does, by way of other servers: a prompt is computed on a "
        "prefill server, by preference one that has computed its beginning before, and answered "
        "on a decode server. What fails is tried on another one, until the answer begins. From "
        f"the environment come {_INSTANCE_API_KEY}, the API key of these servers, and "
        f"{ROUTER_SECRET}, the secret that they know this router by."
    )
    add_config(parser)
    group = parser.add_argument_group("servers")
    group.add_argument(
        "--prefill",
        action="extend",
        nargs="+",
        default=[],
        metavar="URL",
        help="servers with --role prefill (default: none, decode servers compute prompts)",
    )
    group.add_argument(
        "--decode",
        action="extend",
        nargs="+",
        required=True,
        metavar="URL",
        help="servers with --role decode, for example http://127.0.0.1:8001",
    )
    group.add_argument(
        "--no-stream-layers",
        dest="stream_layers",
        action="store_false",
        help="send a prompt to the decode server when it is computed (default: at once, so that "
        "each layer is fetched while the next one is computed)",
    )
    for option, about, default in (
        ("--prefill-timeout", "then the decode server computes the prompt", "60s"),
        ("--request-timeout", "of a whole answer", "10m"),
        ("--health-interval", "between questions to each server how it is", "1s"),
        ("--health-timeout", "a server that does not say is down", "5s"),
    ):
        add_duration(group, option, about, default=default)
    add_number(
        group, "--max-requests", "that are under way; more are answered with 429", default=1024
    )
    add_http_options(parser.add_argument_group("router"))


def run(arguments: argparse.Namespace) -> None:
    """Routes until a signal.

    Raises:
        ConfigurationError: a bad option, URL, host or port.
    """
    from kvconnect.server.http.listener import Listener
    from kvconnect.server.route.run import route
    from kvconnect.server.route.settings import RouteSettings

    settings = RouteSettings(
        **http_fields(arguments),
        **picked(arguments, "prefill", "decode", "stream_layers", "max_requests"),
        **picked(arguments, "prefill_timeout_s", "request_timeout_s"),
        **picked(arguments, "health_interval_s", "health_timeout_s"),
        instance_api_key=os.environ.get(_INSTANCE_API_KEY),
        router_secret=os.environ.get(ROUTER_SECRET),
    )
    with closing(Listener.bind(settings)) as listener, traces_of(arguments) as traces:
        routed = nullcontext if traces is None else traces.routed
        ready = partial(tell_url, "router", listener)
        route(settings, listener, ready=ready, routed=routed)
