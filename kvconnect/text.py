"""Checks the text of users, once, where it enters."""

from __future__ import annotations

from urllib.parse import unquote

from kvconnect.errors import ConfigurationError
from kvconnect.redaction import text_without_passwords

_LONGEST = 80
_LOOKED_AT = 4096


def check_text(field: str, text: str) -> None:
    """Checks that `text` can be encoded: half of a surrogate pair stands for no character.

    Raises:
        ConfigurationError: `text` has such a character; names `field`, its position, and the
            remedy.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{field}: {text[error.start]!r} at position {error.start} is half of a surrogate "
            "pair, no character; give valid Unicode (as bytes.decode(errors='replace') makes)"
        ) from error


def shown(value: object) -> str:
    """Returns `value` for an error message: short, and without a store's password.

    Only the beginning of long texts and lists is read.
    """
    if isinstance(value, (str, bytes, list, tuple)):
        value = value[:_LOOKED_AT]
    text = repr(value)[:_LOOKED_AT]
    # The end of a URL is uncertain if its password has an odd character.
    decoded = unquote(unquote(text))  # a tier's URL within a store's
    if "@" in decoded or "://" in decoded or text_without_passwords(text) != text:
        return "what was given"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def printable(text: str) -> str:
    """Returns `text`, written by another program, without characters that steer a terminal."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in text)
