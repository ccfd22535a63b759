"""The commands about one server: its kind, its blocks, its statistics."""

from __future__ import annotations

import re
from dataclasses import dataclass

import hiredis

from kvconnect.backends.redis.commands import REFUSALS, call, command, sound
from kvconnect.backends.redis.errors import permissions
from kvconnect.backends.redis.format import Names
from kvconnect.backends.redis.settings import Address, Mode, RedisSettings
from kvconnect.backends.redis.wire import Wire
from kvconnect.errors import BackendUnavailable, ConfigurationError
from kvconnect.trace import warn_once

_OLDEST = (6, 2)
_PAGE = 512
_SURVEYED = 200_000
# The most pages without a key in a row; many occur only after nearly all keys were deleted.
_MOST_EMPTY_PAGES = 10_000


def check_server(settings: RedisSettings, names: Names, wire: Wire) -> None:
    """Tries the commands of this store.

    Raises:
        ConfigurationError: the server is of another kind, too old, or the user lacks rights.
        BackendUnavailable: the server does not serve now.
    """
    _send_and_check(wire, [command(b"PING")], settings)
    _check_kind(_info(wire, "server"), wire.server, settings)
    # A redirect by a cluster's node is accepted, because the node has checked the user's rights
    # before.
    tried = [
        command(b"GETRANGE", names.probe, 0, 0),
        command(b"TOUCH", names.probe),
        command(b"SET", names.probe, b"", b"PX", 1),
        command(b"UNLINK", names.probe),
        command(b"ZREVRANGE", names.probe + b":", 0, 0),
    ]
    _send_and_check(wire, tried, settings)
    memory = _info(wire, "memory")
    if memory.get("maxmemory", "0") != "0" and memory.get("maxmemory_policy") == "noeviction":
        warn_once(
            f"redis.noeviction {wire.server}",
            f"Redis at {wire.server}: maxmemory-policy is noeviction: once its maxmemory is used "
            "up it stores no more blocks; allkeys-lru drops old ones instead",
        )


def takes_writes(names: Names, nbytes: int, wire: Wire) -> bool:
    """Returns whether a server that refused to store a value would store one of `nbytes` now.

    This is an estimate: servers that evict old keys, or belong to a cluster, count as accepting.
    """
    reply = call(wire, b"SET", names.probe, b"", b"PX", 1)
    if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(REFUSALS):
        return False
    memory = _info(wire, "memory")
    limit = int(memory.get("maxmemory", 0))
    # The server adds the value to its used memory before it decides.
    room = limit - int(memory.get("used_memory", 0)) - 2 * nbytes
    return not limit or memory.get("maxmemory_policy") != "noeviction" or room > 0


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of one server.

    Attributes:
        maxmemory: bytes; 0: it has no limit.
        policy: its ``maxmemory-policy``; empty: the user may not read it.
    """

    server: Address
    maxmemory: int
    policy: str


def room_of(wire: Wire) -> Room:
    """Returns what a server does once its memory is full."""
    memory = _info(wire, "memory")
    return Room(
        wire.server, int(memory.get("maxmemory", 0)), memory.get("maxmemory_policy", "").strip()
    )


def scan(stem: bytes, cursor: int, wire: Wire) -> tuple[int, list[bytes]]:
    """Returns the next cursor of SCAN, 0 after the last, and names that begin with `stem`."""
    pattern = re.sub(rb"([*?[\]\\^-])", rb"\\\1", stem) + b"*"
    only = (b"MATCH", pattern) if stem else ()
    reply = sound(call(wire, b"SCAN", cursor, b"COUNT", _PAGE, *only))
    match reply:
        case [bytes() as after, list() as found] if after.isdigit():
            return int(after), [name for name in found if isinstance(name, bytes)]
    raise BackendUnavailable(f"Redis: {reply!r} is no answer to SCAN")


def survey(names: Names, wire: Wire) -> dict[str, int]:
    """Returns ``blocks`` and ``bytes`` of this store, ``used_memory`` and ``maxmemory`` of all.

    The first two are estimates from `_SURVEYED` keys if there are more. ``maxmemory`` is 0 without
    a limit.
    """
    total = sound(call(wire, b"DBSIZE"))
    seen = blocks = nbytes = cursor = empty = 0
    while True:
        cursor, found = scan(b"", cursor, wire)
        empty = 0 if found else empty + 1
        if empty > _MOST_EMPTY_PAGES:
            raise BackendUnavailable(f"Redis at {wire.server}: its listing does not end")
        ours = [n for n in found if n.startswith((names.prefix + b"b:", names.prefix + b"p:"))]
        wire.send([command(b"STRLEN", name) for name in ours])
        lengths = wire.replies(len(ours))
        seen += len(found)
        blocks += sum(names.key(name) is not None for name in ours)
        nbytes += sum(length for length in lengths if isinstance(length, int))
        if cursor == 0 or seen >= _SURVEYED:
            break
    if cursor and seen and isinstance(total, int):
        blocks, nbytes = blocks * total // seen, nbytes * total // seen
    memory = _info(wire, "memory")
    limits = {name: int(memory.get(name, 0)) for name in ("used_memory", "maxmemory")}
    return {"blocks": blocks, "bytes": nbytes, **limits}


def _send_and_check(wire: Wire, commands: list[bytes], settings: RedisSettings) -> None:
    wire.send([b"".join(commands)])
    for reply in wire.replies(len(commands)):
        text = str(reply) if isinstance(reply, hiredis.ReplyError) else ""
        if text.startswith("NOPERM"):
            raise ConfigurationError(f"{settings}: {text}; {permissions(settings)}")
        if text.startswith("NOAUTH"):
            raise ConfigurationError(
                f"{settings}: {text}; give user and password: redis://user:password@host"
            )
        # Other errors depend on the present state, which may change before the first call.
        if text.startswith(("LOADING", "MASTERDOWN", "ERR")):
            sound(reply)


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


def _info(wire: Wire, section: str) -> dict[str, str]:
    """Returns a server's information; empty if the user may not read it."""
    reply = call(wire, b"INFO", section)
    if isinstance(reply, hiredis.ReplyError) and str(reply).startswith("NOPERM"):
        return {}
    answer = sound(reply)
    if not isinstance(answer, bytes):
        raise BackendUnavailable(f"Redis: {answer!r} where bytes were due")
    lines = answer.decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
