"""The secret that the processes of one user on one machine share without being given it."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from pathlib import Path

from kvconnect.errors import ConfigurationError
from kvconnect.user_cache import cache_directory

_NAME = "transfer.secret"
_NBYTES = 32


def local_secret() -> str:
    """Returns this user's secret for transfers between processes of this machine.

    The secret is in the file ``transfer.secret`` of the user's cache directory, which no other user
    can read. The first call makes the file. Processes that call at the same time get one secret.

    Raises:
        ConfigurationError: the file cannot be made, belongs to another user, can be read by
            another user, or is damaged.
    """
    try:
        path = cache_directory() / _NAME
        if not os.path.lexists(path):
            _make(path)
        return _read(path)
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"no secret can be kept for this user ({error}); give one instead, the same to all"
        ) from error


def _make(path: Path) -> None:
    """Makes the file atomically, unless another process has made it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    number, name = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(number, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(_NBYTES))
        path.hardlink_to(name)
    except FileExistsError:
        pass
    finally:
        Path(name).unlink(missing_ok=True)


def _read(path: Path) -> str:
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(number, encoding="ascii", errors="replace") as file:
        state = os.fstat(number)
        private = stat.S_ISREG(state.st_mode) and not stat.S_IMODE(state.st_mode) & 0o077
        if not private or state.st_uid != os.geteuid():
            raise ConfigurationError(
                f"{path}: is not a file of this user's that no other user can read; remove it"
            )
        secret = file.read(2 * _NBYTES + 1)
    if len(secret) != 2 * _NBYTES:
        raise ConfigurationError(f"{path}: is damaged; remove it")
    return secret
