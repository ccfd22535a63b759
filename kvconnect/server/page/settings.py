"""The settings of a server of the page of a store alone."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kvconnect.server.settings import HttpSettings, check_header

__all__ = ["PageSettings"]


class PageSettings(HttpSettings):
    """The settings of a server of the page of a store alone.

    Attributes:
        admin_key: required for texts, keys and digests of salts; ``None``: they are refused.
    """

    admin_key: Annotated[str | None, Field(repr=False)] = None

    @model_validator(mode="after")
    def _admin_key_fits_a_header(self) -> Self:
        check_header("admin_key", self.admin_key)
        return self
