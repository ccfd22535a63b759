"""The transfer pair by its roles, as configurations for ``LLM(connector=…)``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from pydantic import model_validator

from kvconnect.config import KvCacheConnectorConfig, TransferConfig


class _OfRole(KvCacheConnectorConfig):
    _role: ClassVar[str]

    def __init__(self, /, *args: Any, **values: Any) -> None:
        given = values.get("transfer")
        if isinstance(given, Mapping):
            values |= {"transfer": {"role": self._role, **given}}
        super().__init__(*args, **values)

    @model_validator(mode="after")
    def _has_role(self) -> Self:
        role = None if self.transfer is None else self.transfer.role
        if role not in {self._role, "both"}:
            raise ValueError(f"transfer.role={role!r}: must be '{self._role}' or 'both'")
        return self


class PrefillConnector(_OfRole):
    """Publishes prompts: ``LLM(model, connector=PrefillConnector(transfer={…}))``.

    All fields are those of `KvCacheConnectorConfig`; ``transfer.role`` is ``prefill`` or ``both``.
    """

    _role = "prefill"

    transfer: TransferConfig | None = TransferConfig(role="prefill")


class DecodeConnector(_OfRole):
    """Fetches prompts: ``LLM(model, connector=DecodeConnector())``.

    All fields are those of `KvCacheConnectorConfig`; ``transfer.role`` is ``decode`` or ``both``.
    """

    _role = "decode"

    transfer: TransferConfig | None = TransferConfig(role="decode")
