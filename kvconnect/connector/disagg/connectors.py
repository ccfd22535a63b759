"""The transfer pair by its roles, as configurations for ``LLM(connector=…)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from kvconnect.config import KvCacheConnectorConfig, TransferConfig

__all__ = ["DecodeConnector", "PrefillConnector"]


class PrefillConnector(KvCacheConnectorConfig):
    """Publishes prompts: ``LLM(model, connector=PrefillConnector(transfer={…}))``.

    All fields are those of `KvCacheConnectorConfig`; ``transfer.role`` is ``prefill`` or ``both``.
    """

    transfer: TransferConfig | None = TransferConfig(role="prefill")

    def __init__(self, /, *args: Any, **values: Any) -> None:
        super().__init__(*args, **_with_role("prefill", values))

    @model_validator(mode="after")
    def _hands_out(self) -> Self:
        _check_role(self, "prefill")
        return self


class DecodeConnector(KvCacheConnectorConfig):
    """Fetches prompts: ``LLM(model, connector=DecodeConnector())``.

    All fields are those of `KvCacheConnectorConfig`; ``transfer.role`` is ``decode`` or ``both``.
    """

    transfer: TransferConfig | None = TransferConfig(role="decode")

    def __init__(self, /, *args: Any, **values: Any) -> None:
        super().__init__(*args, **_with_role("decode", values))

    @model_validator(mode="after")
    def _fetches(self) -> Self:
        _check_role(self, "decode")
        return self


def _with_role(role: str, values: dict[str, Any]) -> dict[str, Any]:
    """Returns `values`, with `role` added to the transfer's fields if they name none."""
    given = values.get("transfer")
    return values | {"transfer": {"role": role, **given}} if isinstance(given, Mapping) else values


def _check_role(config: KvCacheConnectorConfig, needed: str) -> None:
    role = None if config.transfer is None else config.transfer.role
    if role not in {needed, "both"}:
        raise ValueError(f"transfer.role={role!r}: must be '{needed}' or 'both'")
