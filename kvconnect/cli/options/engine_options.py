"""The options of commands that run a model: cache, store, engine."""

from __future__ import annotations

import argparse
from inspect import signature
from typing import TYPE_CHECKING

from kvconnect.backends.url import parse_size
from kvconnect.cli.command import Options, add_duration, add_number, add_old_name, picked
from kvconnect.config import (
    DEFAULT_LOOKUP_TIMEOUT_MS,
    DEFAULT_SCHEDULING,
    KvCacheConfig,
    KvCacheConnectorConfig,
    TransferConfig,
)
from kvconnect.errors import ConfigurationError
from kvconnect.events.settings import EventsConfig

if TYPE_CHECKING:
    from kvconnect.engine.llm import LLM
    from kvconnect.engine.sampling.drafts import NgramSpeculation


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds the model's argument."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="model directory, or a name in the local Hugging Face cache, as org/name",
    )


def add_cache_options(parser: argparse.ArgumentParser, *, store: bool = True) -> Options:
    """Adds the options of the KV cache, and those of the `store`; returns their group."""
    group = parser.add_argument_group("KV cache")
    if store:
        group.add_argument("--store", metavar="URL", help="for example disk:///var/cache/kv")
        add_lookup_timeout(group)
        group.add_argument(
            "--overlap-loads",
            action=argparse.BooleanOptionalAction,
            default=True,
            help="compute the beginning of a prompt while its end is loaded",
        )
        add_number(
            group,
            "--min-priority",
            "save only blocks of at least this retention priority, 0 to 100",
            default=0,
            metavar="P",
        )
        _add_connector(group)
    group.add_argument("--dtype", default="auto", metavar="D", help="of model and cache")
    add_number(group, "--tokens-per-block", "a power of two", default=32, metavar="T")
    add_number(group, "--kv-cache-tokens", "at most so many tokens fit the cache")
    group.add_argument(
        "--kv-cache-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="of the cache: the model's (default), or fp8: one byte each, rounded",
    )
    group.add_argument(
        "--host-cache",
        metavar="SIZE",
        help="host memory for blocks that leave the device, for example 2GiB (default: none)",
    )
    group.add_argument(
        "--max-attention-window",
        nargs="+",
        type=int,
        metavar="W",
        help="tokens that each layer looks back at most, repeated over the layers",
    )
    return group


def _add_connector(group: Options) -> None:
    group.add_argument(
        "--connector-module",
        metavar="MODULE",
        help="a module of your own with the next two, which extend the built-in classes (with "
        "--store), or are a whole connector",
    )
    for half, base in (("scheduler", "OffloadScheduler"), ("worker", "OffloadWorker")):
        group.add_argument(
            f"--connector-{half}-class", metavar="CLASS", help=f"extends {base} (default: it)"
        )


def add_lookup_timeout(parser: Options) -> None:
    """Adds the option of how long a step waits for the store's answers."""
    add_duration(
        parser,
        "--lookup-timeout",
        "what the store may delay a step by; later answers are misses",
        default=f"{DEFAULT_LOOKUP_TIMEOUT_MS:g}ms",
        unit="ms",
        zero=True,
    )
    add_old_name(parser, "--lookup-timeout-ms", "--lookup-timeout", float)


def add_engine_options(
    parser: argparse.ArgumentParser, *, scheduling: str = DEFAULT_SCHEDULING
) -> Options:
    """Adds the options of the engine, with `scheduling` as a default; returns their group.

    An option that is named like an argument of `LLM` becomes that argument.
    """
    group = parser.add_argument_group("engine")
    add_number(group, "--max-num-tokens", "tokens of a step", default=2048)
    add_number(group, "--max-batch-size", "requests of a step", default=64)
    group.add_argument(
        "--scheduling",
        choices=("guaranteed_no_evict", "max_utilization"),
        default=scheduling,
        help="start a request only if all that run can get to their end, or as soon as its prompt "
        "fits: blocks that run out are taken from the last one started, which goes on later "
        f"(default: {scheduling})",
    )
    group.add_argument(
        "--speculative",
        choices=("ngram",),
        help="verify several tokens per step that followed the same words before (greedy only; "
        "the answer stays the same)",
    )
    add_number(group, "--num-draft-tokens", "so many at most; with --speculative (default: 5)")
    group.add_argument(
        "--model-revision",
        metavar="NAME",
        help="stands for the weights in the store's keys, for example org/name@commit, so that "
        "they are not digested; no other weights may ever go by this name",
    )
    group.add_argument("--device", default="auto", metavar="D", help="cpu, cuda or auto")
    add_number(
        group,
        "--tensor-parallel-size",
        "ranks that each compute a part of every layer, on a GPU each or sharing the CPU's cores, "
        "in processes that this one starts",
        default=1,
        metavar="RANKS",
    )
    return group


def connector_of(
    arguments: argparse.Namespace, *, transfer: TransferConfig | None = None
) -> KvCacheConnectorConfig | None:
    """Returns the store or connector that `arguments` name, checked before the slow imports.

    Raises:
        ConfigurationError: its URL is wrong, or an option needs ``--store``.
    """
    names = ("connector_module", "connector_scheduler_class", "connector_worker_class")
    classes = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.store is None and transfer is None and not classes:
        return None
    from kvconnect.connector.io.identity import check_store

    config = KvCacheConnectorConfig(
        url=arguments.store,
        lookup_timeout_ms=arguments.lookup_timeout_ms,
        overlap_loads=arguments.overlap_loads,
        min_priority=arguments.min_priority,
        transfer=transfer,
        **classes,
    )
    check_store(config)
    return config


def check_model(name: str) -> None:
    """Checks that a model of this name exists, before the library that reads it is loaded.

    Raises:
        ConfigurationError: there is none.
    """
    from kvconnect.engine.checkpoint.hub_cache import model_directory

    directory = model_directory(name)
    if not directory.is_dir():
        raise ConfigurationError(f"model: '{directory}' is not a directory; give one with a model")


def open_llm(
    arguments: argparse.Namespace,
    *,
    transfer: TransferConfig | None = None,
    connector: KvCacheConnectorConfig | None = None,
    events: EventsConfig | None = None,
) -> LLM:
    """Makes the engine that `arguments` describe; `transfer` makes it publish or fetch prompts.

    Without `connector`, the options determine it. With `events` the engine publishes the blocks of
    its cache.

    Raises:
        ConfigurationError: names the option or the field, and what is right.
    """
    connector = connector or connector_of(arguments, transfer=transfer)
    check_model(arguments.model)
    from kvconnect.engine.llm import LLM

    alike = vars(arguments).keys() & signature(LLM).parameters.keys()
    given = picked(arguments, *alike) | {
        "kv_cache": _cache_config(arguments),
        "connector": connector,
        "speculative": _speculation(arguments),
        "events": events,
    }
    return LLM(**given)


def _cache_config(arguments: argparse.Namespace) -> KvCacheConfig:
    host = arguments.host_cache
    windows = arguments.max_attention_window
    return KvCacheConfig(
        tokens_per_block=arguments.tokens_per_block,
        max_tokens=arguments.kv_cache_tokens,
        dtype=arguments.kv_cache_dtype,
        host_cache_size=0 if host is None else parse_size(host, field="--host-cache"),
        max_attention_window=None if windows is None else tuple(windows),
    )


def _speculation(arguments: argparse.Namespace) -> NgramSpeculation | None:
    from kvconnect.engine.sampling.drafts import NgramSpeculation

    count = arguments.num_draft_tokens
    if arguments.speculative is None:
        if count is not None:
            raise ConfigurationError(f"--num-draft-tokens {count}: needs --speculative ngram")
        return None
    return NgramSpeculation() if count is None else NgramSpeculation(num_draft_tokens=count)


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
