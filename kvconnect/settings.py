"""The base of all settings: they are frozen, and refuse unknown fields.

Every error is a `ConfigurationError` that names the field and the value, and for an unknown field
the nearest valid one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from kvconnect.errors import ConfigurationError, nearest
from kvconnect.text import shown


class Settings(BaseModel):
    """A set of immutable settings that refuses unknown fields.

    Args:
        args: the fields that the class allows without their names, in order; most allow none.
        values: fields by name.

    Raises:
        ConfigurationError: an unknown field or a bad value; names the field, the value, the remedy.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,  # a password, perhaps; `_explain` shows what may be shown
    )

    positional: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[Mapping[str, str]] = {}
    texts: ClassVar[frozenset[str]] = frozenset()
    """The fields whose wrong values an error shows by type alone, unless they are text."""
    dropped: ClassVar[frozenset[str]] = frozenset()
    """Names that are accepted like fields, without effect."""

    def __init__(self, /, *args: Any, **values: Any) -> None:
        cls = type(self)
        if args or cls.aliases:
            values = _named(cls, args, values)
        if cls.dropped:
            values = {name: values[name] for name in values if name not in cls.dropped}
        for name in values.keys() - cls.model_fields.keys():
            known = (*cls.model_fields, *cls.dropped)
            raise ConfigurationError(
                f"{cls.__name__}: unknown field {shown(name)}; {nearest(name, known)}"
            )
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigurationError(_explain(cls, error)) from error

    @classmethod
    def given(cls, field: str, value: object) -> Self:
        """Returns `value` after checking every field again, since pydantic does not check copies.

        Args:
            field: the caller's name of the value, for the error.
            value: given by a caller; also as a mapping of field names to values.

        Raises:
            ConfigurationError: `value` has another type, or a field has a bad value.
        """
        if isinstance(value, Mapping):
            return cls(**{str(name): each for name, each in value.items()})
        if isinstance(value, cls):
            return type(value)(**vars(value))
        names = f"{', '.join(list(cls.model_fields)[:2])}, ..."
        raise ConfigurationError(
            f"{field}: {shown(value)} is a {type(value).__name__}; give a {cls.__name__}({names})"
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuses the change of a field.

        Raises:
            ConfigurationError: always.
        """
        self._refuse_change(f"{name} to {shown(value)}", name)

    def __delattr__(self, name: str) -> NoReturn:
        """Refuses the removal of a field, like `__setattr__`."""
        self._refuse_change(f"{name} to nothing", name)

    def _refuse_change(self, what: str, name: str) -> NoReturn:
        cls = type(self)
        if name not in cls.model_fields:
            raise ConfigurationError(
                f"{cls.__name__}: unknown field {shown(name)}; {nearest(name, cls.model_fields)}"
            )
        raise ConfigurationError(
            f"{cls.__name__}: cannot change {what}: settings are frozen; "
            f"make others, as with model_copy(update={{'{name}': ...}})"
        )


def _named(cls: type[Settings], args: tuple[Any, ...], values: dict[str, Any]) -> dict[str, Any]:
    if len(args) > len(cls.positional):
        allowed = ", ".join(cls.positional) or "none"
        raise ConfigurationError(
            f"{cls.__name__}: {len(args)} values were given without a name; "
            f"possible without one: {allowed}"
        )
    given = dict(zip(cls.positional, args, strict=False))
    for name, value in values.items():
        field = cls.aliases.get(name, name)
        if field in given:
            also = "" if field == name else f" ('{name}' is the same)"
            raise ConfigurationError(f"{cls.__name__}.{field}: was given twice{also}")
        given[field] = value
    return given


def _explain(cls: type[Settings], error: ValidationError) -> str:
    name, parts = cls.__name__, []
    for detail in error.errors():
        where = ".".join(str(part) for part in detail["loc"])
        message = detail["msg"].removeprefix("Value error, ")
        # For a missing field, the error's input is the whole object.
        missing = not where or detail["type"] == "missing"
        given = detail["input"]
        value = "" if missing else f"={shown(given)}"
        if where in cls.texts and not isinstance(given, str):
            value = f" (a {type(given).__name__})"
        parts.append(f"{name}.{where}{value}: {message}" if where else f"{name}: {message}")
    return "; ".join(parts)
