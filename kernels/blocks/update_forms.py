"""The forms and modes of updates of a linear cache, under TensorRT's names and our own."""

from __future__ import annotations

from enum import Enum
from typing import NoReturn, TypeVar

from kvconnect.errors import ConfigurationError, nearest

__all__ = ["AttentionIOForm", "KVCacheMode", "cache_mode_of", "update_form_of"]


class AttentionIOForm(Enum):
    """The form of new keys or values: padded ``[B, N, S_new, H]``, or packed ``[tokens, N, H]``.

    Names with ``k`` are TensorRT's names in C++, the others its names in Python.
    """

    PADDED_BHND = "padded_bhnd"
    PACKED_NHD = "packed_nhd"
    kPADDED_BHND = PADDED_BHND  # noqa: N815
    kPACKED_NHD = PACKED_NHD  # noqa: N815


class KVCacheMode(Enum):
    """The mode of cache updates: tokens are written one after the other from an index on."""

    LINEAR = "linear"
    kLINEAR = LINEAR  # noqa: N815


_Kind = TypeVar("_Kind", AttentionIOForm, KVCacheMode)


def _names(kind: type[_Kind]) -> dict[str, _Kind]:
    return {name: one for one in kind for name in (one.value, one.name, f"k{one.name}")}


_FORMS = _names(AttentionIOForm)
_MODES = _names(KVCacheMode)


def update_form_of(given: object) -> AttentionIOForm:
    """Returns the form that `given` names.

    Args:
        given: an `AttentionIOForm`, a member of TensorRT's enum, or the name of a form:
            ``"padded_bhnd"``, ``"PADDED_BHND"``, ``"kPADDED_BHND"``.

    Raises:
        ConfigurationError: there is no such form; the message names the nearest.
    """
    return _FORMS.get(_name(given)) or _unknown("update_form", given, AttentionIOForm)


def cache_mode_of(given: object) -> KVCacheMode:
    """Returns the mode that `given` names, as `update_form_of` does.

    Raises:
        ConfigurationError: there is no such mode; the message names the nearest.
    """
    return _MODES.get(_name(given)) or _unknown("cache_mode", given, KVCacheMode)


def _name(given: object) -> str:
    # Members of the enums in TensorRT's binding have names, of whatever class they are.
    return given if isinstance(given, str) else str(getattr(given, "name", given))


def _unknown(field: str, given: object, kind: type[Enum]) -> NoReturn:
    hint = nearest(_name(given), [one.value for one in kind])
    raise ConfigurationError(f"{field}={given!r}: {hint}")
