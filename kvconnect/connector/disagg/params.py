"""A request's ``kv_transfer_params``, checked, and the name of the transfer that they ask for.

``{"do": "prefill"}`` makes the engine publish what it computes, under the ``transfer_id`` given
beside it or a new one; the result carries what the other engine needs. ``{"transfer_id": …,
"address": "host:port"}`` makes the engine fetch that prompt. A router that chooses the id can send
both at the same time. A router that passes on a result also sends ``tokens``, and ``tp_size`` if
the publishing engine has several ranks. Other keys belong to other connectors.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvconnect.address import host_and_port
from kvconnect.errors import ConfigurationError
from kvconnect.request import LlmRequest
from kvconnect.text import check_text, shown

_LONGEST_ID = 200
_MOST_RANKS = 1024


@dataclass(frozen=True, slots=True)
class PrefillParams:
    """A request to publish the KV that is computed.

    Attributes:
        transfer_id: the name to publish it under; ``None``: this engine makes one.
    """

    transfer_id: str | None = None


@dataclass(frozen=True, slots=True)
class FetchParams:
    """A request to fetch the KV that another engine computes.

    Attributes:
        transfer_id: the name that it is published under.
        address: ``host:port`` of that engine's control channel.
        num_tokens: leading tokens that are published; ``None``: all of this prompt but the last.
        tp_size: tensor-parallel ranks of that engine.
    """

    transfer_id: str
    address: str
    num_tokens: int | None = None
    tp_size: int = 1


def transfer_params(
    params: Mapping[str, Any] | None, role: str
) -> PrefillParams | FetchParams | None:
    """Returns the transfer that `params` request from this connector, or ``None``.

    Raises:
        ConfigurationError: a value is wrong or missing, or an engine of this
            ``TransferConfig.role`` cannot do the transfer.
    """
    if not params or not ({"do", "transfer_id", "address"} & params.keys()):
        return None
    do = params.get("do", "decode" if "address" in params else None)
    if do in {"prefill", "decode"} - {role} and role != "both":
        raise ConfigurationError(
            f"kv_transfer_params: they ask for '{do}', this engine has "
            f"TransferConfig.role='{role}'; send them to another, or give role='both'"
        )
    if do == "prefill":
        given = params.get("transfer_id")
        return PrefillParams(None if given is None else _id(given))
    if do != "decode":
        raise ConfigurationError(
            f"kv_transfer_params['do']: {shown(do)} is neither 'prefill' nor 'decode'; give one, "
            "or the 'address' of what is to be fetched"
        )
    for name in ("transfer_id", "address"):
        if name not in params:
            raise ConfigurationError(
                f"kv_transfer_params: '{name}' is missing; to fetch, 'transfer_id' and 'address' "
                "are needed, as the result of the prefill carries them"
            )
    return FetchParams(
        _id(params["transfer_id"]),
        _address(params["address"]),
        _count("tokens", params.get("tokens")),
        _count("tp_size", params.get("tp_size"), most=_MOST_RANKS) or 1,
    )


def transfer_name(
    transfer_id: str, request: LlmRequest, num_tokens: int, model_digest: bytes
) -> str:
    """Returns the name of the first `num_tokens` tokens of `request`, published as `transfer_id`.

    A reader with another prompt, model or salt computes another name, so the tokens need no other
    comparison. tokens_per_block and the number of ranks are no part of the name, because readers
    convert blocks to their own shape.
    """
    digest = hashlib.blake2b(request.namespace.encode(), digest_size=32, person=b"kvc-transfer")
    digest.update(struct.pack("<q", len(model_digest)) + model_digest)
    digest.update(request.tokens.view[:num_tokens].tobytes())
    return f"{transfer_id}/{num_tokens}/{digest.hexdigest()}"


def transfer_id_of(name: str) -> str:
    """Returns the id in a name that `transfer_name` made."""
    return name.rsplit("/", 2)[0]


def _id(value: object) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_ID:
        raise ConfigurationError(
            f"kv_transfer_params['transfer_id']: {shown(value)} must be text of 1 to "
            f"{_LONGEST_ID} characters"
        )
    check_text("kv_transfer_params['transfer_id']", value)
    return value


def _count(name: str, value: object, *, most: int | None = None) -> int | None:
    if value is None or (type(value) is int and 0 < value <= (most or value)):
        return value
    limit = "at least 1" if most is None else f"1 to {most}"
    raise ConfigurationError(
        f"kv_transfer_params['{name}']: {shown(value)} must be an integer, {limit}"
    )


def _address(value: object) -> str:
    try:
        _, port = host_and_port(value if isinstance(value, str) else "")
    except ValueError as error:
        raise ConfigurationError(
            f"kv_transfer_params['address']: {shown(value)} {error}"
        ) from error
    if port == 0 or not isinstance(value, str):
        raise ConfigurationError(f"kv_transfer_params['address']: {shown(value)}: port 0 is none")
    return value
