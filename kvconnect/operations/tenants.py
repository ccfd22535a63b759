"""The use that each tenant makes of a store: blocks, bytes, hits and tokens saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from os import PathLike
from pathlib import Path

from kvconnect.backend import Backend, StoredEntry
from kvconnect.errors import ConfigurationError
from kvconnect.keys import Namespace, salt_of, salt_tag
from kvconnect.operations.progress import Progress
from kvconnect.operations.visit import each_block

NO_SALT = "(no salt)"
"""The name of the requests without a salt, which are one tenant."""

_NO_SALT = salt_tag(None)
_NO_NAMESPACE = Namespace().encode()


@dataclass(slots=True)
class TenantUse:
    """The use that a tenant makes of a store.

    Attributes:
        digest: `salt_tag` of the tenant; ``None``: for blocks of unknown tenants.
        name: the name for the digest, if there is one.
        blocks: stored blocks, counted in every tier.
        bytes: the bytes of their frames.
        hits: loads of these blocks; ``None``: no part of the store counts loads.
        tokens_saved: the tokens of those loads, of pool group 0. Each rank's share of a block
            counts by itself. ``None``: not counted.
    """

    digest: bytes | None
    name: str | None = None
    blocks: int = 0
    bytes: int = 0
    hits: int | None = None
    tokens_saved: int | None = None

    def add(self, entry: StoredEntry) -> None:
        """Counts a stored block."""
        self.blocks += 1
        self.bytes += entry.nbytes
        if entry.hits is not None:
            tokens = 0 if entry.group or entry.tokens is None else len(entry.tokens)
            self.hits = (self.hits or 0) + entry.hits
            self.tokens_saved = (self.tokens_saved or 0) + entry.hits * tokens

    def as_json(self) -> dict[str, object]:
        """Returns the fields, the digest in hexadecimal."""
        return asdict(self) | {"digest": None if self.digest is None else self.digest.hex()}


class TenantUses:
    """The use of each tenant, counted block by block."""

    def __init__(self) -> None:
        self._found: dict[bytes | None, TenantUse] = {}

    def add(self, entry: StoredEntry) -> None:
        """Counts a stored block for its tenant."""
        digest = tenant_of(entry.namespace)
        if (use := self._found.get(digest)) is None:
            use = self._found[digest] = TenantUse(digest)
        use.add(entry)

    def most_first(self, names: Mapping[bytes, str]) -> list[TenantUse]:
        """Returns the uses with their `names`; the tenant with most bytes is first."""
        named = {_NO_SALT: NO_SALT, **names}
        return sorted(
            (
                replace(one, name=None if one.digest is None else named.get(one.digest))
                for one in self._found.values()
            ),
            key=lambda one: (-one.bytes, one.digest or b""),
        )


async def each_tenant(stores: Mapping[str, Backend], names: Mapping[bytes, str]) -> list[TenantUse]:
    """Lists all blocks of `stores`, the parts of one store, and returns the use of each tenant.

    The tenant with most bytes is first. Takes some 100 bytes of memory per block.

    Raises:
        BackendUnavailable: a store fails.
    """
    found = TenantUses()
    for part, store in stores.items():
        async with Progress(f"list {part}", 0, "blocks") as progress:
            async for entry in each_block(store, progress):
                found.add(entry)
    return found.most_first(names)


def read_names(path: str | PathLike[str]) -> dict[bytes, str]:
    """Returns the names in the file at `path`, by digest.

    Raises:
        ConfigurationError: the file cannot be read, or is no JSON object of digests and names.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"--tenants {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"--tenants {path}: a JSON object is needed")
    names = {}
    for text, name in content.items():
        try:
            digest = bytes.fromhex(text)
        except ValueError:
            digest = b""
        if len(digest) != len(_NO_SALT) or not isinstance(name, str) or not name.isprintable():
            raise ConfigurationError(
                f"--tenants {path}: {text!r:.80}: give the 32 hexadecimal digits of a salt's "
                "digest, and a name"
            )
        names[digest] = name
    return names


def tenant_of(namespace: bytes) -> bytes | None:
    """Returns the `salt_tag` of a block's namespace as a store keeps it; ``None``: not known."""
    # Older versions kept the namespace alone; that of requests without anything is known.
    return _NO_SALT if namespace == _NO_NAMESPACE else salt_of(namespace)
