"""The options of ``kvconnect simulate`` that describe machines and the rates of their store."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from kvconnect.cli.command import add_duration, add_number, add_old_name, picked
from kvconnect.config import KvCacheConfig
from kvconnect.errors import ConfigurationError
from kvconnect.simulate.first_token import LoadRates
from kvconnect.simulate.machine import Machine
from kvconnect.simulate.tier_size import TierSize

_REFINEMENTS = {"store_first_byte_s": 0.0, "step_s": 0.0, "step_tokens": None}
"""Options that only matter beside ``--store-rate``, with their defaults."""

_TIERS = {"device": "device_cache", "host": "host_cache", "external": "external"}
"""The option of each tier's size, as argparse names its value."""

_SERVING = (
    "tokens_per_block",
    "prefill_tokens_per_s",
    "decode_tokens_per_s",
    "max_batch_size",
    "max_waiting",
    "offload_min_priority",
    "state_interval",
)


class Machines(NamedTuple):
    """The machines to simulate.

    Attributes:
        runs: the label and the machine of each run; a single one without a label unless sizes are
            swept.
        swept: the tier whose size differs between runs; ``None``: no tier.
    """

    runs: list[tuple[str, Machine]]
    swept: str | None


def parse_machines(arguments: argparse.Namespace, token_nbytes: int | None) -> Machines:
    """Returns one machine, or one for each size of ``--sweep``.

    Raises:
        ConfigurationError: an option is missing, malformed or out of range.
    """
    # Checked first, so that a bad block size is not reported as a bad size of a tier.
    KvCacheConfig(
        tokens_per_block=arguments.tokens_per_block,
        secondary_offload_min_priority=arguments.offload_min_priority,
        state_interval=arguments.state_interval,
    )
    if arguments.state_interval % arguments.tokens_per_block:
        raise ConfigurationError(
            f"--state-interval {arguments.state_interval}: must be a multiple of "
            f"--tokens-per-block {arguments.tokens_per_block}"
        )
    state_blocks = _state_blocks(arguments, token_nbytes)
    swept, sweep = _parse_sweep(arguments.sweep)
    fixed = {}
    for tier, name in _TIERS.items():
        text: str | None = getattr(arguments, name)
        if text is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if tier == swept:
            raise ConfigurationError(f"{option} {text}: --sweep gives its sizes; leave it out")
        size = TierSize.parse(text, field=option)
        fixed[tier] = size.num_blocks(arguments.tokens_per_block, token_nbytes, field=option)
    if swept is None:
        return Machines([("", _machine(arguments, fixed, state_blocks))], None)
    runs = []
    for size in sweep:
        blocks = size.num_blocks(arguments.tokens_per_block, token_nbytes, field=f"--sweep {swept}")
        runs.append((size.text, _machine(arguments, {**fixed, swept: blocks}, state_blocks)))
    return Machines(runs, swept)


def _parse_sweep(text: str | None) -> tuple[str | None, list[TierSize]]:
    if text is None:
        return None, []
    tier, equals, sizes = text.partition("=")
    if not equals or tier not in _TIERS:
        raise ConfigurationError(
            f"--sweep {text}: TIER=SIZE,SIZE,… is needed, where TIER is device, host or external"
        )
    return tier, [TierSize.parse(size, field=f"--sweep {tier}") for size in sizes.split(",")]


def _state_blocks(arguments: argparse.Namespace, token_nbytes: int | None) -> int:
    if arguments.state_size is None:
        return 0
    size = TierSize.parse(arguments.state_size, field="--state-size")
    tokens = size.tokens(token_nbytes, field="--state-size")
    return -int(-tokens // arguments.tokens_per_block)


def _machine(arguments: argparse.Namespace, blocks: dict[str, int], state_blocks: int) -> Machine:
    if "device" not in blocks:
        raise ConfigurationError("--device-cache: is needed, for example --device-cache 500ktok")
    if blocks["device"] < 1:
        raise ConfigurationError("--device-cache: not even one block fits; give a larger size")
    return Machine(
        device_blocks=blocks["device"],
        host_blocks=blocks.get("host", 0),
        external_blocks=blocks.get("external", 0),
        state_blocks=state_blocks,
        **picked(arguments, *_SERVING),
    )


def add_store_rates(parser: argparse.ArgumentParser) -> None:
    """Adds the options of rates."""
    group = parser.add_argument_group(
        "time to the first token",
        "Of prompts that the external store has a part of, each alone on the engine.",
    )
    group.add_argument(
        "--store-rate",
        metavar="SIZE,…",
        help="that the store loads per second: 1GiB or 8ktok; several are compared "
        "(default: loads are not timed)",
    )
    add_duration(group, "--store-first-byte", "until a load begins", default="0s", zero=True)
    add_duration(group, "--step", "of a step beside its tokens", default="0s", zero=True)
    for name in ("--store-first-byte", "--step"):
        add_old_name(group, f"{name}-s", name, float)
    add_number(group, "--step-tokens", "prompt tokens per step at most (default: no limit)")


def parse_store_rates(
    arguments: argparse.Namespace, machines: Sequence[Machine], token_nbytes: int | None
) -> list[LoadRates]:
    """Returns the rates to compare; none without ``--store-rate``.

    Raises:
        ConfigurationError: an option is malformed, out of range or without effect.
    """
    refinements = picked(arguments, *_REFINEMENTS)
    if arguments.store_rate is None:
        for name, value in refinements.items():
            if value != _REFINEMENTS[name]:
                option = name.removesuffix("_s").replace("_", "-")
                raise ConfigurationError(f"--{option} {value}: needs --store-rate")
        return []
    if not any(machine.external_blocks for machine in machines):
        raise ConfigurationError(
            f"--store-rate {arguments.store_rate}: there is no store; give --external SIZE"
        )
    rates = []
    for text in arguments.store_rate.split(","):
        size = TierSize.parse(text.strip().removesuffix("/s"), field="--store-rate")
        rates.append(
            LoadRates(
                label=size.text,
                load_tokens_per_s=size.tokens(token_nbytes, field="--store-rate"),
                prefill_tokens_per_s=arguments.prefill_tokens_per_s,
                tokens_per_block=arguments.tokens_per_block,
                **refinements,
            )
        )
    return rates
