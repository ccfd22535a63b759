"""The options of ``kvconnect simulate`` that describe how fast a store and a model are."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvconnect.cli.command import add_duration, add_number, add_old_name, picked
from kvconnect.errors import ConfigurationError

if TYPE_CHECKING:
    from kvconnect.simulate.first_token import LoadRates
    from kvconnect.simulate.machine import Machine

__all__ = ["add_store_rates", "parse_store_rates"]

_REFINEMENTS = {"store_first_byte_s": 0.0, "step_s": 0.0, "step_tokens": None}
"""Options that only matter beside ``--store-rate``, with their defaults."""


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
    from kvconnect.simulate.first_token import LoadRates
    from kvconnect.simulate.tier_size import TierSize

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
