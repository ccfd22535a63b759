"""The transfer pair by its roles, as configurations for ``LLM(connector=…)``."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from kvconnect.config import KvCacheConnectorConfig, TransferConfig

__all__ = ["DecodeConnector", "PrefillConnector"]


class PrefillConnector(KvCacheConnectorConfig):
    """Hands out prompts: ``LLM(model, connector=PrefillConnector(transfer={…}))``.

    All fields are those of `KvCacheConnectorConfig`; ``transfer.role`` is ``prefill`` or ``both``.
    """

    transfer: TransferConfig | None = TransferConfig(role="prefill")

    @model_validator(mode="after")
    def _hands_out(self) -> Self:
        _check_role(self, "prefill")
        return self


class DecodeConnector(KvCacheConnectorConfig):
    """Fetches prompts: ``LLM(model, connector=DecodeConnector())``.

    All fields are those of `KvCacheConnectorConfig`; ``transfer.role`` is ``decode`` or ``both``.
    """

    transfer: TransferConfig | None = TransferConfig(role="decode")

    @model_validator(mode="after")
    def _fetches(self) -> Self:
        _check_role(self, "decode")
        return self


def _check_role(config: KvCacheConnectorConfig, needed: str) -> None:
    role = None if config.transfer is None else config.transfer.role
    if role not in {needed, "both"}:
        raise ValueError(f"transfer.role={role!r}: must be '{needed}' or 'both'")
