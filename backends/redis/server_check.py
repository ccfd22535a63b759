"""Whether a server is what the URL says, before the first request depends on it."""

from __future__ import annotations

import hiredis

from kvconnect.backends.redis.client import permissions
from kvconnect.backends.redis.scan import info
from kvconnect.backends.redis.settings import Address, Mode, RedisSettings
from kvconnect.backends.redis.transfer import REFUSALS, command, sound
from kvconnect.backends.redis.wire import Reply, Wire
from kvconnect.errors import ConfigurationError
from kvconnect.trace import warn_once

__all__ = ["check_server", "takes_writes"]

_OLDEST = (6, 2)


def check_server(settings: RedisSettings, probe: bytes, wire: Wire, server: Address) -> None:
    """Try what will be needed.

    Raises:
        ConfigurationError: the server is of another kind, too old, or the user may not do it.
        BackendUnavailable: it does not serve now.
    """
    _send_and_check(wire, [command(b"PING")], settings)
    _check_kind(info(wire, "server"), server, settings)
    # A node of a cluster may say that another one has the key: it has looked at the rights before.
    tried = [
        command(b"GETRANGE", probe, 0, 0),
        command(b"TOUCH", probe),
        command(b"SET", probe, b"", b"PX", 1),
        command(b"UNLINK", probe),
        command(b"ZREVRANGE", probe + b":", 0, 0),
    ]
    _send_and_check(wire, tried, settings)
    memory = info(wire, "memory")
    if memory.get("maxmemory", "0") != "0" and memory.get("maxmemory_policy") == "noeviction":
        warn_once(
            f"redis.noeviction {server}",
            f"Redis at {server}: maxmemory-policy is noeviction: once its maxmemory is used up it "
            "stores no more blocks; allkeys-lru drops old ones instead",
        )


def takes_writes(probe: bytes, nbytes: int, wire: Wire, server: Address) -> bool:
    """Whether a server that refused to store a value would store one of `nbytes` now.

    As far as it tells: servers that drop old keys for new ones may, and so may those of a cluster.
    """
    wire.send([command(b"SET", probe, b"", b"PX", 1)])
    (reply,) = wire.replies(1)
    if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(REFUSALS):
        return False
    memory = info(wire, "memory")
    limit = int(memory.get("maxmemory", 0))
    # What arrives counts as used before the server decides.
    room = limit - int(memory.get("used_memory", 0)) - 2 * nbytes
    return not limit or memory.get("maxmemory_policy") != "noeviction" or room > 0


def _send_and_check(wire: Wire, commands: list[bytes], settings: RedisSettings) -> None:
    wire.send([b"".join(commands)])
    for reply in wire.replies(len(commands)):
        _check_reply(reply, settings)


def _check_reply(reply: Reply, settings: RedisSettings) -> None:
    if not isinstance(reply, hiredis.ReplyError):
        return
    text = str(reply)
    if text.startswith("NOPERM"):
        raise ConfigurationError(f"{settings}: {text}; {permissions(settings)}")
    if text.startswith("NOAUTH"):
        raise ConfigurationError(
            f"{settings}: {text}; give user and password: redis://user:password@host"
        )
    if text.startswith(("LOADING", "MASTERDOWN", "ERR")):
        sound(reply)
    # Others tell of the present state, which may be another one when it matters.


def _check_kind(server: dict[str, str], address: Address, settings: RedisSettings) -> None:
    mode = server.get("redis_mode") or server.get("server_mode")  # Valkey's name for it
    version = server.get("redis_version", "")
    if mode == "sentinel":
        raise ConfigurationError(
            f"Redis at {address}: is a sentinel; write redis+sentinel://{address}/<service>"
        )
    if mode == "cluster" and settings.mode is not Mode.CLUSTER:
        raise ConfigurationError(
            f"Redis at {address}: is a node of a cluster; write redis+cluster://{address}"
        )
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers and numbers < _OLDEST:
        raise ConfigurationError(f"Redis at {address}: is version {version}; 6.2 is needed")
