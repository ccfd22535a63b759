"""The mapping of errors of redis-py and of sockets to kvconnect's, with advice."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from redis import exceptions

from kvconnect.backends.redis.settings import Address, Mode, RedisSettings
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.redaction import as_cause

_AUTH = ("WRONGPASS", "NOAUTH", "AUTH", "invalid username", "Authentication")
_LOOK_AT_USER = "look at user and password in the URL (redis://user:password@host, percent-encoded)"


@contextmanager
def explained(settings: RedisSettings, server: Address | str) -> Iterator[None]:
    """Maps errors of redis-py and of sockets to kvconnect's, with advice on what to change.

    Raises:
        ConfigurationError: the server answered, and refuses these settings.
        BackendUnavailable: the server was not reached, or does not serve now.
    """
    try:
        yield
    except ConfigurationError as error:
        if as_cause(error, settings.hide_passwords) is error:
            raise
        raise ConfigurationError(settings.hide_passwords(str(error))) from None
    except BackendUnavailable as error:
        text = settings.hide_passwords(str(error))
        cause = as_cause(error, settings.hide_passwords)
        raise BackendUnavailable(f"Redis at {server}: {text}") from cause
    except (
        exceptions.RedisError,
        exceptions.RedisClusterException,
        OSError,
        UnicodeError,  # a host that cannot be one
    ) as error:
        cause = as_cause(error, settings.hide_passwords)
        raise _translated(error, settings, server) from cause


def _translated(
    error: Exception, settings: RedisSettings, server: Address | str
) -> ConfigurationError | BackendUnavailable:
    text = settings.hide_passwords(str(error)) or type(error).__name__
    at = f"Redis at {server}"
    remedy = _remedy(error, text, settings)
    if remedy is not None:
        return ConfigurationError(f"{at}: {text}; {remedy}")
    if isinstance(error, exceptions.BusyLoadingError):
        return BackendUnavailable(f"{at}: is loading its data ({text})")
    if isinstance(error, exceptions.TimeoutError | TimeoutError):
        hint = (
            "" if settings.tls is None else f"; if it does not speak TLS, write {_plain(settings)}"
        )
        return BackendUnavailable(f"{at}: no answer for {settings.timeout:g} s ({text}){hint}")
    hint = ""
    network = settings.hosts[0].port != 0
    if network and settings.tls is None and ("closed" in text or "reset" in text):
        hint = "; if it wants TLS, write " + (
            "rediss://" if settings.mode is Mode.SINGLE else "tls=yes"
        )
    return BackendUnavailable(f"{at}: {text}{hint}")


def _remedy(error: Exception, text: str, settings: RedisSettings) -> str | None:
    """Returns advice on the URL; ``None`` if no change of it would help."""
    if _caused_by(error, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in text:
        return "name the file with its authority in tls_ca=, or write tls_verify=no"
    if _caused_by(error, ssl.SSLError):
        plain = _plain(settings)
        return f"if it does not speak TLS, write {plain}; else look at tls_cert= and tls_key="
    if isinstance(error, exceptions.AuthenticationError):
        return _LOOK_AT_USER
    place = f"path /{settings.db}" if settings.hosts[0].port else f"db={settings.db}"
    said = {
        **dict.fromkeys(_AUTH, _LOOK_AT_USER),
        "NOPERM": permissions(settings),
        "DB index": f"{place}: the server has no such database",
        "Cluster mode is not enabled": "it is no cluster; write redis://",
    }
    return next((remedy for part, remedy in said.items() if part in text), None)


def _plain(settings: RedisSettings) -> str:
    return "redis://" if settings.mode is Mode.SINGLE else "tls=no"


def permissions(settings: RedisSettings) -> str:
    """Returns advice on the server's access list."""
    cluster = " +cluster" if settings.mode is Mode.CLUSTER else ""
    return (
        f"the user needs ~{settings.prefix}* +@read +@write +@connection +@keyspace +info{cluster}"
        " in its ACL"
    )


def _caused_by(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, kind):
            return True
        error = error.__cause__ or error.__context__
    return False
