"""Every error that kvconnect raises, as one tree, split by what the caller does next.

::

    KvConnectError
    ├── ConfigurationError (ValueError)     fix the configuration or the input, then try again
    │   ├── UnknownScheme                   a store URL whose scheme no installed backend registers
    │   ├── MissingExtra                    an optional dependency is not installed
    │   ├── UnsupportedModel                the engine cannot serve this model, and says why
    │   ├── PeerRefused                     a peer and this process do not fit together
    │   └── ConnectorContractError          a connector class broke its contract
    ├── RetryLater                          nothing is wrong; the same call may succeed later
    │   ├── ModelChanged                    a model's files changed while they were read
    │   ├── OutOfBlocks                     no block can be allocated now; nothing changed
    │   ├── BackendUnavailable (OSError)    a store cannot be reached or answered with an error
    │   ├── RankLost                        a rank of the engine died, or does not answer
    │   ├── BackendTimeout (TimeoutError)   a store did not answer within its deadline
    │   └── PeerUnreachable (OSError)       no transport answers there, or it refuses this one
    ├── Recompute                           cached data is of no use; compute it instead
    │   ├── BadMessage                      a peer said what is no message, or breaks its schema
    │   ├── BadFrame                        a stored block is damaged, foreign or of another format
    │   ├── OtherCodec                      a stored block is sound, but encoded with other settings
    │   └── PullFailed                      a read from a peer's memory failed or was abandoned
    └── UsageError                          a bug in the calling code; report it
        ├── DuplicateRequest                the request id is in use
        ├── UnknownRequest (KeyError)       no such request
        ├── SequencesLive                   the operation needs that no sequence or pin is live
        ├── EngineClosed                    the engine was closed, or died of the error it names
        └── RankDivergence                  ranks disagree about the step they are in

Errors of other libraries are mapped to these where they enter, with ``raise ... from``.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from difflib import get_close_matches

__all__ = [
    "BackendTimeout",
    "BackendUnavailable",
    "BadFrame",
    "BadMessage",
    "ConfigurationError",
    "ConnectorContractError",
    "DuplicateRequest",
    "EngineClosed",
    "KvConnectError",
    "MissingExtra",
    "ModelChanged",
    "OtherCodec",
    "OutOfBlocks",
    "PeerRefused",
    "PeerUnreachable",
    "PullFailed",
    "RankDivergence",
    "RankLost",
    "Recompute",
    "RetryLater",
    "SequencesLive",
    "UnknownRequest",
    "UnknownScheme",
    "UnsupportedModel",
    "UsageError",
    "nearest",
]


class KvConnectError(Exception):
    """Base of every error raised on purpose by kvconnect."""


class ConfigurationError(KvConnectError, ValueError):
    """A setting or an input is wrong; the message names the field, the value and what is right."""


class UnknownScheme(ConfigurationError):
    """No installed backend registers the scheme of a store URL."""


class MissingExtra(ConfigurationError):
    """An optional dependency is missing; the message says which extra to install."""

    def __init__(self, what: str, extra: str) -> None:
        # The name is not on PyPI.
        super().__init__(
            f"{what} needs the extra '{extra}': pip install '.[{extra}]' in a checkout of "
            f"kvconnect, or pip install 'WHEEL[{extra}]' with its wheel"
        )


class UnsupportedModel(ConfigurationError):
    """The engine cannot serve this model; the message is the reason."""


class PeerRefused(ConfigurationError):
    """A peer and this process do not fit together: one of them must be configured otherwise.

    Attributes:
        field: what differs, for example ``dtype`` or ``secret``.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ConnectorContractError(ConfigurationError):
    """A connector class broke the contract of its base class; the message names the class."""


class RetryLater(KvConnectError):
    """The same call may succeed later."""


class ModelChanged(RetryLater):
    """A model directory changed while it was loaded: what was read may be of two models."""


class OutOfBlocks(RetryLater):
    """Blocks cannot be allocated now. Nothing was changed by the call that raised this."""


class BackendUnavailable(RetryLater, OSError):
    """A store cannot be reached or refused the operation. What was asked may be half done."""


class BackendTimeout(RetryLater, TimeoutError):
    """A store did not answer within its deadline.

    Attributes:
        pending: Done when the abandoned operation has really ended. Until then its buffers
            belong to it and must not be handed on. ``None`` if it never started.
    """

    def __init__(self, message: str, pending: Future[None] | None = None) -> None:
        super().__init__(message)
        self.pending = pending


class PeerUnreachable(RetryLater, OSError):
    """A peer cannot be reached, is another incarnation than expected, or refuses to talk."""


class RankLost(RetryLater):
    """A rank of the engine died, or does not answer: make the engine again, on all ranks.

    Attributes:
        rank: which one.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Recompute(KvConnectError):
    """Cached data cannot be used; the answer is to compute it."""


class BadMessage(Recompute):
    """A peer sent bytes that are no message of this protocol. The connection is of no use."""


class BadFrame(Recompute):
    """A stored block is damaged, belongs to another key or layout, or has another format."""


class OtherCodec(Recompute):
    """A stored block is sound, but its codec or encryption key is not the one configured here."""


class PullFailed(Recompute):
    """A read from a peer's memory did not complete. Its destination holds anything.

    Attributes:
        reason: ``peer`` (it died, was disconnected or broke the protocol), ``corrupt`` (other bytes
            came than those that it sent), ``refused`` (it has no such memory), ``deadline``,
            ``abandoned``, or ``closed`` (by this side, for all pulls).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UsageError(KvConnectError):
    """The calling code broke a rule of the API."""


class DuplicateRequest(UsageError):
    """A live request has this id already."""


class UnknownRequest(UsageError, KeyError):
    """No live request has this id."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class SequencesLive(UsageError):
    """The operation is refused while a sequence or a pin is live."""


class EngineClosed(UsageError):
    """The engine takes no more requests; ``__cause__`` is the error it died of, if it did."""


class RankDivergence(UsageError):
    """Ranks are in different steps or disagree about its outcome."""


_LONGEST_NAME = 100


def nearest(name: str, valid: Iterable[str]) -> str:
    """A clause for error messages: the valid name that `name` may stand for, or all of them."""
    names = sorted(valid)
    folded = {one.lower(): one for one in names}
    close = get_close_matches(name[:_LONGEST_NAME].lower(), folded, n=1, cutoff=0.5)
    return f"did you mean '{folded[close[0]]}'?" if close else f"valid are {', '.join(names)}"
