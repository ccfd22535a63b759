"""A request to the served model, of any kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from kvconnect.server.openai.unserved import without_unserved
from kvconnect.settings import Settings

__all__ = ["ModelRequest"]


class ModelRequest(Settings):
    """The field that all requests have.

    Attributes:
        model: name of the model; ``None``: the served one.
    """

    model: str | None = None

    neutral: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    """Fields that this kind does not serve, beside those that none does; see `without_unserved`."""

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Returns the request that `body`, parsed JSON, asks for.

        Raises:
            ConfigurationError: a field is unknown, wrong, or asks for what is not served.
        """
        return cls(**without_unserved(body, cls.neutral))
