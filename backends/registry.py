"""The registry of backends by URL scheme."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TypeAlias

from kvconnect.backend import Backend
from kvconnect.backends.guard.codecs import Codecs
from kvconnect.backends.guard.labels import place_of
from kvconnect.backends.guard.store import GuardedBackend
from kvconnect.backends.url import StoreUrl
from kvconnect.errors import ConfigurationError, MissingExtra, UnknownScheme, nearest

BackendFactory: TypeAlias = Callable[[StoreUrl], Backend]
"""The target of an entry point of the group `ENTRY_POINT_GROUP`, named by its URL scheme."""

ENTRY_POINT_GROUP = "kvconnect.backends"

# Also listed as entry points of the installed package; repeated here for a bare checkout.
_BUILT_IN = {
    "disk": "kvconnect.backends.disk:from_url",
    "memory": "kvconnect.backends.memory:from_url",
    "nixl": "kvconnect.backends.nixl:from_url",
    "redis": "kvconnect.backends.redis:from_url",
    "redis+cluster": "kvconnect.backends.redis:from_url",
    "redis+sentinel": "kvconnect.backends.redis:from_url",
    "redis+unix": "kvconnect.backends.redis:from_url",
    "rediss": "kvconnect.backends.redis:from_url",
    "s3": "kvconnect.backends.s3:from_url",
    "tiered": "kvconnect.backends.tiered:from_url",
}


def schemes() -> tuple[str, ...]:
    """Returns the URL schemes that `open_backend` knows here, sorted."""
    from importlib.metadata import entry_points

    return tuple(sorted({*_BUILT_IN, *entry_points(group=ENTRY_POINT_GROUP).names}))


def open_backend(
    url: str | Backend,
    *,
    deadline_s: float = 30.0,
    verify_frames: bool = True,
    raw: bool = False,
    codec: str | None = None,
    key_file: str | None = None,
) -> GuardedBackend:
    """Returns the guarded backend of `url`, or a guard around `url` if it is a backend.

    The call opens no connection and makes no file: ``await backend.open(layouts)`` does that.

    Args:
        url: for example ``disk:///var/cache/kv?capacity=200GiB``, or your own `Backend`.
        deadline_s: the time that each call may take, in seconds.
        verify_frames: true to check every loaded block. False is for measuring only, and is logged.
        raw: true to pass values unchanged, without writing or checking frames, for tools that copy
            or examine stored frames (`kvconnect.frame.check` checks one).
        codec: the codecs of payloads: one of ``fp8`` and ``int8`` (lossy), one of ``zstd`` and
            ``lz4``, ``aes-gcm``, in this order and joined by ``+``. Every store URL accepts this
            parameter and `key_file`, too.
        key_file: file with the secret key of ``aes-gcm``.

    Raises:
        UnknownScheme: no installed backend serves the scheme.
        MissingExtra: a backend serves the scheme, but an optional dependency is missing.
        ConfigurationError: the URL is malformed or has a parameter the backend does not know.
    """
    if isinstance(url, GuardedBackend) and not raw:
        if codec or key_file:
            raise ConfigurationError(f"codec={codec}: {url.name} has its own already")
        return url
    backend: Backend
    place = ""
    if isinstance(url, GuardedBackend):
        backend, place = url.inner, url.place
    elif isinstance(url, Backend):
        backend = url
    else:
        parsed = StoreUrl.parse(url)
        backend, place = _make(parsed), place_of(parsed)
    return GuardedBackend(
        backend,
        deadline_s=deadline_s,
        verify_frames=verify_frames,
        raw=raw,
        codecs=codecs_of(url if isinstance(url, str) else backend, codec=codec, key_file=key_file),
        place=place,
    )


def codecs_of(
    store: str | Backend | None, *, codec: str | None = None, key_file: str | None = None
) -> Codecs:
    """Returns the codecs that `open_backend` would apply to `store`, without opening it.

    Raises:
        ConfigurationError, MissingExtra: raised as by `open_backend`.
    """
    if isinstance(store, GuardedBackend):
        return store.codecs
    if isinstance(store, str):
        parsed = StoreUrl.parse(store)
        codec = _one_of("codec", parsed.codec, codec)
        key_file = _one_of("key_file", parsed.key_file, key_file)
    return Codecs.parse(codec, key_file)


def _one_of(name: str, in_url: str | None, given: str | None) -> str | None:
    if in_url and given and in_url != given:
        raise ConfigurationError(f"{name}={given}: the store URL says {name}={in_url}; give one")
    return in_url or given


def _make(url: StoreUrl) -> Backend:
    backend = factory_of(url.scheme)(url)
    if not isinstance(backend, Backend):
        raise ConfigurationError(
            f"scheme '{url.scheme}': its entry point made a {type(backend).__name__}, not a Backend"
        )
    return backend


def factory_of(scheme: str) -> BackendFactory:
    """Returns the factory of backends of `scheme`; imports its module.

    Raises:
        UnknownScheme: no installed backend serves it.
        MissingExtra: one does, but an optional dependency is missing.
    """
    built_in = _BUILT_IN.get(scheme)
    if built_in is not None:
        module, _, name = built_in.partition(":")
        try:
            factory: BackendFactory = getattr(import_module(module), name)
        except ImportError as error:
            extra = module.rpartition(".")[2]  # is named as the room is: kvconnect.backends.redis
            raise MissingExtra(f"store scheme '{scheme}' ({error})", extra) from error
        return factory
    from importlib.metadata import entry_points

    for entry in entry_points(group=ENTRY_POINT_GROUP, name=scheme):
        try:
            loaded: BackendFactory = entry.load()
        except ImportError as error:
            extra = entry.extras[0] if entry.extras else scheme
            raise MissingExtra(f"store scheme '{scheme}' ({error})", extra) from error
        return loaded
    known = schemes()
    meant = [one for one in known if scheme in one.split("+")] or known
    raise UnknownScheme(f"store scheme '{scheme}' is unknown; {nearest(scheme, meant)}")
