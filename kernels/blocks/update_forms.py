"""The forms and modes of updates of a linear cache, by TensorRT's names and by ours."""

from __future__ import annotations

from enum import Enum
from typing import NoReturn, TypeVar

from kvconnect.errors import ConfigurationError, nearest

__all__ = ["AttentionIOForm", "KVCacheMode", "cache_mode_of", "update_form_of"]


class AttentionIOForm(Enum):
    """The form of new keys or values: padded ``[B, N, S_new, H]``, or packed ``[tokens, N, H]``.

    The names with ``k`` are those of TensorRT in C++, those without those in Python.
    """

    PADDED_BHND = "padded_bhnd"
    PACKED_NHD = "packed_nhd"
    kPADDED_BHND = PADDED_BHND  # noqa: N815
    kPACKED_NHD = PACKED_NHD  # noqa: N815


class KVCacheMode(Enum):
    """The mode of cache updates: one token after the other from an index on."""

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
        given: an `AttentionIOForm`, TensorRT's own, or the name of one: ``"padded_bhnd"``,
            ``"PADDED_BHND"``, ``"kPADDED_BHND"``.

    Raises:
        ConfigurationError: there is no such form; names the nearest.
    """
    return _FORMS.get(_name(given)) or _unknown("update_form", given, AttentionIOForm)


def cache_mode_of(given: object) -> KVCacheMode:
    """Returns the mode that `given` names, as `update_form_of` does.

    Raises:
        ConfigurationError: there is no such mode; names the one that there is.
    """
    return _MODES.get(_name(given)) or _unknown("cache_mode", given, KVCacheMode)


def _name(given: object) -> str:
    # Whatever TensorRT's binding makes of its enums, the members have names.
    return given if isinstance(given, str) else str(getattr(given, "name", given))


def _unknown(field: str, given: object, kind: type[Enum]) -> NoReturn:
    hint = nearest(_name(given), [one.value for one in kind])
    raise ConfigurationError(f"{field}={given!r}: {hint}")
