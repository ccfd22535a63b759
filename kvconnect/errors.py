"""The tree of errors that kvconnect raises, split by what the caller does next.

::

    KvConnectError
    ├── ConfigurationError (ValueError)     fix the configuration or the input, then try again
    │   ├── UnknownScheme                   a store URL whose scheme no installed backend registers
    │   ├── MissingExtra                    an optional dependency is not installed
    │   ├── UnsupportedModel                the engine cannot serve this model, and says why
    │   ├── PeerRefused                     a peer is configured unlike this process
    │   └── ConnectorContractError          a connector class broke its contract
    ├── RetryLater                          nothing is wrong; the same call may succeed later
    │   ├── ModelChanged                    a model's files changed while they were read
    │   ├── OutOfBlocks                     no block can be allocated now; nothing changed
    │   ├── BackendUnavailable (OSError)    a store cannot be reached or answered with an error
    │   ├── RankLost                        a rank of the engine died, or does not answer
    │   ├── BackendTimeout (TimeoutError)   a store did not answer within its deadline
    │   └── PeerUnreachable (OSError)       no peer answers at the address, or it refuses
    ├── Recompute                           cached data cannot be used; compute it instead
    │   ├── BadMessage                      a peer sent bytes that are no valid message
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
    """The base of every error raised on purpose by kvconnect."""


class ConfigurationError(KvConnectError, ValueError):
    """The error of a wrong setting or input; names the field, the value and the remedy."""


class UnknownScheme(ConfigurationError):
    """The error of a store URL whose scheme no installed backend registers."""


class MissingExtra(ConfigurationError):
    """The error of a missing optional dependency; the message says which extra to install."""

    def __init__(self, what: str, extra: str) -> None:
        # The name is not on PyPI.
        super().__init__(
            f"{what} needs the extra '{extra}': pip install '.[{extra}]' in a checkout of "
            f"kvconnect, or pip install 'WHEEL[{extra}]' with its wheel"
        )


class UnsupportedModel(ConfigurationError):
    """The error of a model that the engine cannot serve; the message is the reason."""


class PeerRefused(ConfigurationError):
    """The error of a peer that is configured unlike this process: change one of the two.

    Attributes:
        field: the field that differs, for example ``dtype`` or ``secret``.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class ConnectorContractError(ConfigurationError):
    """The error of a connector class that broke its contract; the message names the class."""


class RetryLater(KvConnectError):
    """The base of errors after which the same call may succeed later."""


class ModelChanged(RetryLater):
    """The error of a model directory that changed while it was loaded; the data may be mixed."""


class OutOfBlocks(RetryLater):
    """The error of blocks that cannot be allocated now. The failed call changed nothing."""


class BackendUnavailable(RetryLater, OSError):
    """The error of a store that is unreachable or refused. The operation may be half done."""


class BackendTimeout(RetryLater, TimeoutError):
    """The error of a store that did not answer within its deadline.

    Attributes:
        pending: a future that is done when the abandoned operation has ended. Until then the
            operation owns its buffers: do not reuse them. ``None`` if it never started.
    """

    def __init__(self, message: str, pending: Future[None] | None = None) -> None:
        super().__init__(message)
        self.pending = pending


class PeerUnreachable(RetryLater, OSError):
    """The error of a peer that is unreachable, another incarnation, or refuses to talk."""


class RankLost(RetryLater):
    """The error of a rank that died or does not answer.

    The engine must be started anew on all ranks.

    Attributes:
        rank: the number of the rank.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class Recompute(KvConnectError):
    """The base of errors for cached data that cannot be used; compute it instead."""


class BadMessage(Recompute):
    """The error of bytes from a peer that are no valid message. The connection is unusable."""


class BadFrame(Recompute):
    """The error of a stored block that is damaged, or has another key, layout or format."""


class OtherCodec(Recompute):
    """The error of a sound stored block with another codec or encryption key than configured."""


class PullFailed(Recompute):
    """The error of an incomplete read from a peer's memory. Its destination is undefined.

    Attributes:
        reason: ``peer`` (the peer died, was disconnected or broke the protocol), ``corrupt`` (the
            bytes differ from those that the peer sent), ``refused`` (the peer has no such memory),
            ``deadline``, ``abandoned``, or ``closed`` (this side ended all pulls).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class UsageError(KvConnectError):
    """The base of errors of calling code that broke a rule of the API."""


class DuplicateRequest(UsageError):
    """The error of a request id that another live request uses."""


class UnknownRequest(UsageError, KeyError):
    """The error of a request id that no live request has."""

    def __str__(self) -> str:
        return Exception.__str__(self)


class SequencesLive(UsageError):
    """The error of an operation that is refused while a sequence or a pin is live."""


class EngineClosed(UsageError):
    """The error of an engine that was closed, or died of the error in ``__cause__``."""


class RankDivergence(UsageError):
    """The error of ranks that are in different steps or disagree about an outcome."""


_LONGEST_NAME = 100


def nearest(name: str, valid: Iterable[str]) -> str:
    """Returns a clause for error messages: the valid name most like `name`, or all valid names."""
    names = sorted(valid)
    folded = {one.lower(): one for one in names}
    close = get_close_matches(name[:_LONGEST_NAME].lower(), folded, n=1, cutoff=0.5)
    return f"did you mean '{folded[close[0]]}'?" if close else f"valid are {', '.join(names)}"
