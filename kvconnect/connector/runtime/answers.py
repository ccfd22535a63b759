"""The checks of a connector's answers: an error names the class that broke the contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvconnect.connector.data import Direction, TransferFailure
from kvconnect.errors import ConnectorContractError


def _name(owner: object) -> str:
    return type(owner).__name__


def checked_match(owner: object, answer: object) -> tuple[int, bool]:
    """Returns the answer of `get_num_new_matched_tokens`, checked.

    Raises:
        ConnectorContractError: not ``(int, bool)``, negative, or ``(0, True)``.
    """
    method = f"{_name(owner)}.get_num_new_matched_tokens"
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ConnectorContractError(f"{method} answered {answer!r}; (int, bool) is needed")
    num_tokens, is_async = answer
    if not _is_int(num_tokens):
        raise ConnectorContractError(
            f"{method} answered {answer!r}; the first must be an int, this is a "
            f"{type(num_tokens).__name__}"
        )
    if not isinstance(is_async, bool):
        raise ConnectorContractError(
            f"{method} answered {answer!r}; the second must be a bool, this is a "
            f"{type(is_async).__name__}"
        )
    if num_tokens < 0:
        raise ConnectorContractError(f"{method} answered {answer!r}; tokens cannot be negative")
    if num_tokens == 0 and is_async:
        raise ConnectorContractError(
            f"{method} answered {answer!r}; 0 tokens cannot be loaded in the background"
        )
    return num_tokens, is_async


def checked_keep(owner: object, answer: object) -> bool:
    """Returns the answer of `request_finished`, checked.

    Raises:
        ConnectorContractError: not a bool.
    """
    if isinstance(answer, bool):
        return answer
    raise ConnectorContractError(
        f"{_name(owner)}.request_finished answered {answer!r}; a bool is needed"
    )


def checked_finished(owner: object, answer: object) -> tuple[list[int], list[int]]:
    """Returns the answer of `get_finished`, checked: ids of saved, and of loaded requests.

    Raises:
        ConnectorContractError: not two sequences of request ids.
    """
    if isinstance(answer, tuple) and len(answer) == 2 and all(map(_are_ids, answer)):
        return list(answer[0]), list(answer[1])
    raise ConnectorContractError(
        f"{_name(owner)}.get_finished answered {answer!r}; two lists of request ids are needed"
    )


def checked_failures(owner: object, answer: object) -> list[TransferFailure]:
    """Returns the answer of `get_failed`, checked.

    Raises:
        ConnectorContractError: it is not a sequence of `TransferFailure`, or a field of a failure
            has a wrong type or a negative number of tokens.
    """
    method = f"{_name(owner)}.get_failed"
    if not isinstance(answer, Sequence) or not all(isinstance(o, TransferFailure) for o in answer):
        raise ConnectorContractError(
            f"{method} answered {answer!r}; a list of TransferFailure is needed"
        )
    for failure in answer:
        fields: list[tuple[str, object, bool, str]] = [
            ("request_id", failure.request_id, _is_int(failure.request_id), "an int"),
            ("direction", failure.direction, isinstance(failure.direction, Direction), "Direction"),
            (
                "num_valid_tokens",
                failure.num_valid_tokens,
                _is_int(failure.num_valid_tokens) and failure.num_valid_tokens >= 0,
                "an int of at least 0",
            ),
            ("reason", failure.reason, isinstance(failure.reason, str), "a str"),
            ("writes_ended", failure.writes_ended, isinstance(failure.writes_ended, bool), "bool"),
        ]
        for field, value, right, wanted in fields:
            if not right:
                raise ConnectorContractError(
                    f"{method} answered {failure!r}; {field} must be {wanted}, not {value!r}"
                )
    return list(answer)


def checked_progress(
    owner: object, answer: object, *, method: str = "get_load_progress"
) -> tuple[tuple[int, int], ...]:
    """Returns the answer of `method`, checked: pairs of a request and a position.

    Raises:
        ConnectorContractError: not a mapping of request ids to positions.
    """
    if isinstance(answer, Mapping) and all(_is_int(one) for pair in answer.items() for one in pair):
        return tuple(answer.items())
    raise ConnectorContractError(
        f"{_name(owner)}.{method} answered {answer!r}; a mapping of request ids to "
        "positions is needed"
    )


def _are_ids(value: object) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(map(_is_int, value))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
