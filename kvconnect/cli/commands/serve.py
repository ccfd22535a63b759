"""The command ``kvconnect serve``: serves a model over HTTP with OpenAI's API."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from functools import partial

from pydantic import SecretStr

from kvconnect.address import host_and_port, is_loopback
from kvconnect.backends.url import parse_size
from kvconnect.cli.command import add_number, add_tenants, picked
from kvconnect.cli.options.config_file import add_config
from kvconnect.cli.options.engine_options import (
    add_cache_options,
    add_engine_options,
    add_events_options,
    add_model,
    connector_of,
    events_of,
    open_llm,
)
from kvconnect.cli.options.http_options import (
    METRICS_KEY,
    ROUTER_SECRET,
    add_http_options,
    add_key,
    http_fields,
    key_of,
    tell_url,
    traces_of,
)
from kvconnect.config import TransferConfig
from kvconnect.errors import ConfigurationError
from kvconnect.operations.tenants import read_names
from kvconnect.transfer.local_secret import local_secret

_TRANSFER_SECRET = "KVCONNECT_TRANSFER_SECRET"  # noqa: S105  its name


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``serve``."""
    parser.description = (
        "Serve a Hugging Face causal language model over HTTP: /v1/completions, "
        "/v1/chat/completions and /v1/models as OpenAI's API has them, /health and /metrics. "
        "SIGTERM and Ctrl-C let running requests end, save what is left for the store, and exit "
        "with 0; a second one does not wait for them."
    )
    add_model(parser)
    add_config(parser)
    _add_server(parser)
    _add_transfer(parser)
    add_events_options(parser)
    add_cache_options(parser)
    # Chats without max_tokens would run one at a time, because each may need the model's full
    # length.
    add_engine_options(parser, scheduling="max_utilization")


def _add_server(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add_http_options(group)
    group.add_argument(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="what clients call the model; answers say the first name (default: MODEL)",
    )
    group.add_argument(
        "--chat-template",
        metavar="FILE",
        help="a Jinja template for chats, in the place of the model's own",
    )
    add_key(
        group,
        "admin",
        "what /v1/cache/ (warm, drop, pin, export, …; texts of the page) needs in the place "
        "of the API key",
    )
    group.add_argument(
        "--metrics-key",
        metavar="KEY",
        help="what /metrics and the page's numbers need in the place of the API key; the admin key "
        "serves there, too (default: the admin key alone, or else the API key); in the "
        f"environment: {METRICS_KEY}",
    )
    group.add_argument(
        "--max-import",
        default="16GiB",
        metavar="SIZE",
        help="of all files together that are sent to /v1/cache/import; they lie in the directory "
        "for temporary files (TMPDIR) until their blocks are stored (default: 16GiB)",
    )
    group.add_argument(
        "--require-salt",
        action="store_true",
        help="refuse requests without a cache_salt, so that no tenant's prompts are shared",
    )
    group.add_argument(
        "--page",
        action="store_true",
        help="show the cache in a browser, at /page: hits, lost tokens, tiers, tenants, prompts",
    )
    add_tenants(group, "the page")
    add_number(
        group,
        "--max-queue",
        "completions that wait beyond --max-batch-size; more are answered with 429",
        default=256,
    )


def _add_transfer(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "prefill and decode",
        f"Behind `kvconnect route`, prompts are computed on one server and answered on another. "
        f"From the environment come {ROUTER_SECRET}, which requests with kv_transfer_params must "
        f"carry then (role both needs it), and {_TRANSFER_SECRET}, which prefill and decode "
        "servers prove to each other to know. Without it servers of one user on one machine share "
        "a secret that the first of them makes.",
    )
    group.add_argument(
        "--role",
        choices=("prefill", "decode", "both"),
        help="hand out the KV cache of prompts, fetch it, or both (default: neither)",
    )
    group.add_argument(
        "--transport", choices=("tcp", "nixl"), default="tcp", help="of KV blocks (default: tcp)"
    )
    group.add_argument(
        "--transfer-listen",
        default="127.0.0.1:0",
        metavar="HOST:PORT",
        help=f"where decode servers reach a prefill server (default: 127.0.0.1 and any free port); "
        f"beyond this machine {_TRANSFER_SECRET} is required",
    )
    group.add_argument(
        "--transfer-advertise",
        metavar="HOST:PORT",
        help="where they reach it, if that is another address, as behind 0.0.0.0",
    )
    group.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        help="a prefill server that prompts may be fetched from; may be repeated (default: any on "
        f"this machine); on another machine {_TRANSFER_SECRET} is required",
    )


def run(arguments: argparse.Namespace) -> None:
    """Serves until a signal.

    Raises:
        ConfigurationError: a bad option, an unusable model, store, host or port.
        EngineClosed: the engine failed.
    """
    if arguments.store is not None or arguments.role is None:
        connector_of(arguments)  # reports a wrong URL at once, not after all imports
    events_of(arguments)
    if arguments.tenants is not None and not arguments.page:
        raise ConfigurationError("--tenants: needs --page")
    tenants = {} if arguments.tenants is None else read_names(arguments.tenants)
    from kvconnect.server.http.listener import Listener
    from kvconnect.server.run import read_template, serve, use_template
    from kvconnect.server.settings import ServerSettings

    settings = ServerSettings(
        **http_fields(arguments),
        **picked(arguments, "require_salt", "role", "page"),
        model_names=tuple(arguments.served_model_name or [arguments.model]),
        max_completions=arguments.max_batch_size + arguments.max_queue,
        router_secret=os.environ.get(ROUTER_SECRET),
        admin_key=key_of(arguments, "admin"),
        metrics_key=key_of(arguments, "metrics"),
        max_import_bytes=parse_size(arguments.max_import, field="--max-import"),
        peers=tuple(arguments.peer),
    )
    transfer = _transfer_of(arguments)
    template = None if arguments.chat_template is None else read_template(arguments.chat_template)
    # First, so that a port in use is reported before the model is loaded.
    with (
        closing(Listener.bind(settings)) as listener,
        traces_of(arguments, model=settings.model_names[0]),
        open_llm(arguments, transfer=transfer, events=events_of(arguments)) as llm,
    ):
        if template is not None:
            use_template(llm, template)
        ready = partial(tell_url, settings.model_names[0], listener)
        serve(llm, settings, listener, ready=ready, tenants=tenants)


def _transfer_of(arguments: argparse.Namespace) -> TransferConfig | None:
    """Returns the settings of the transfer, always with a secret.

    Raises:
        ConfigurationError: a setting is wrong, a peer on another machine requires a secret that was
            not given, or no secret can be stored for this user.
    """
    if arguments.role is None:
        return None
    given = TransferConfig(
        **picked(arguments, "role", "transport"),
        listen=arguments.transfer_listen,
        advertise=arguments.transfer_advertise,
        secret=os.environ.get(_TRANSFER_SECRET),
    )
    if given.secret is not None:
        return given
    for peer in arguments.peer:
        with_port = peer if ":" in peer.rpartition("]")[2] else f"{peer}:0"
        if not is_loopback(host_and_port(with_port)[0]):
            raise ConfigurationError(
                f"--peer {peer}: is not on this machine; set {_TRANSFER_SECRET}, the same here and "
                "there"
            )
    try:
        return given.model_copy(update={"secret": SecretStr(local_secret())})
    except ConfigurationError as error:
        raise ConfigurationError(f"{_TRANSFER_SECRET}: {error}") from error
