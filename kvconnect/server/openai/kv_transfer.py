"""The ``kv_transfer_params`` over HTTP, and their meaning for the engine.

Their names are vLLM's. A router sends ``{"do_remote_decode": true}`` to a prefill server, which
computes the prompt without generating, and answers with the parameters for the decode server. A
router that sends both requests at the same time chooses a ``transfer_id`` and sends it with both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, StrictBool, StrictInt, model_validator

from kvconnect.address import host_and_port
from kvconnect.settings import Settings


class KvTransferParams(Settings):
    """The parameters that a router and its servers exchange. ``None``: left out.

    Attributes:
        do_remote_decode: compute the prompt and publish it; another server generates.
        do_remote_prefill: fetch the prompt's KV, which another server computes.
        transfer_id: the name under which the prompt is published.
        remote_engine_id: the engine that published it; for information only.
        remote_host, remote_port: of the prefill server's control channel.
        remote_num_tokens: leading tokens that are published; ``None``: all of this prompt but the
            last one.
        tp_size: tensor-parallel ranks of the prefill server, which listen one port after the other,
            the first at `remote_port`; ``None``: one.
        remote_block_ids: vLLM's field, without effect: block ids of other engines have no meaning
            here.
    """

    do_remote_decode: StrictBool = False
    do_remote_prefill: StrictBool = False
    transfer_id: Annotated[str | None, Field(min_length=1, max_length=200)] = None
    remote_engine_id: Annotated[str | None, Field(max_length=1000)] = None
    remote_host: Annotated[str | None, Field(min_length=1, max_length=255)] = None
    remote_port: Annotated[StrictInt | None, Field(ge=1, le=65535)] = None
    remote_num_tokens: Annotated[StrictInt | None, Field(ge=1)] = None
    tp_size: Annotated[StrictInt | None, Field(ge=1, le=1024)] = None
    remote_block_ids: None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.do_remote_decode and self.do_remote_prefill:
            raise ValueError("do_remote_decode and do_remote_prefill: give one of them")
        if self.do_remote_prefill:
            for name in ("transfer_id", "remote_host", "remote_port"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name}: is needed with do_remote_prefill")
        return self

    @property
    def address(self) -> str:
        """The address that the prompt is fetched from, ``host:port``."""
        return self.addresses[0]

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the prefill server's ranks, in order."""
        host, port = self.remote_host or "", self.remote_port or 0
        shown = f"[{host}]" if ":" in host else host
        return tuple(f"{shown}:{port + rank}" for rank in range(self.tp_size or 1))

    def for_engine(self) -> dict[str, Any] | None:
        """Returns the parameters for the engine's connector; ``None`` if no transfer is ordered."""
        if self.do_remote_decode:
            named = {} if self.transfer_id is None else {"transfer_id": self.transfer_id}
            return {"do": "prefill"} | named
        if not self.do_remote_prefill:
            return None
        given = {"tokens": self.remote_num_tokens, "tp_size": self.tp_size}
        return {"transfer_id": self.transfer_id, "address": self.address} | {
            name: value for name, value in given.items() if value is not None
        }

    @classmethod
    def handed_out(cls, result: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the parameters for a decode server, from the `result` of a computed prompt.

        If `result` has no address, the prompt is not published, and the other server computes it.
        """
        result = result or {}
        told: dict[str, Any] = {"do_remote_prefill": "address" in result, "do_remote_decode": False}
        if "engine" in result:
            told["remote_engine_id"] = result["engine"]
        if "address" in result:
            host, port = host_and_port(result["address"])
            told |= {
                "transfer_id": result["transfer_id"],
                "remote_host": host,
                "remote_port": port,
                "remote_num_tokens": result["tokens"],
            }
            if "tp_size" in result:
                told["tp_size"] = result["tp_size"]
        return told
