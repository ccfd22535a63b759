"""The shares of tenants in a bounded store, and the choice of tenants whose blocks are dropped."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvconnect.backends.url import StoreUrl
from kvconnect.errors import ConfigurationError
from kvconnect.keys import salt_of

_SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%|([01](?:\.\d{1,9})?)")
_OTHERS = "*"
_SHARE_FORM = "a share of the capacity such as 10% or 0.1 is needed"


def tenant_of(namespace: bytes) -> bytes:
    """Returns the tenant of a block's namespace: its `salt_tag`, or ``b""`` if that is not known.

    All blocks whose salt is not known are one tenant.
    """
    return salt_of(namespace) or b""


@dataclass(frozen=True, slots=True)
class Quotas:
    """The tenants' shares of a store's capacity, each from 0 to 1.

    If the shares of all tenants with blocks exceed the whole, they are reduced in proportion.

    Attributes:
        others: the share of a tenant that is not in `own`.
        own: the shares of some tenants, by `tenant_of`.
    """

    others: float
    own: Mapping[bytes, float] = field(default_factory=dict)

    def givers(
        self, usage: Mapping[bytes, int], capacity: int, saving: Collection[bytes]
    ) -> list[tuple[bytes, int]]:
        """Returns the tenants whose blocks may be dropped for room, in order.

        First are the tenants above their share, the one furthest above first. Then come those that
        save: a tenant below its share loses no block to others.

        Args:
            usage: bytes by tenant, the pending save included; all above 0.
            capacity: bytes.
            saving: the tenants that save.

        Returns:
            Each tenant with the bytes by which it exceeds its share and the next tenant in the
            list, at least 0.
        """
        shares = {tenant: self.own.get(tenant, self.others) for tenant in usage}
        total = max(1.0, sum(shares.values()))
        above = {one: usage[one] - capacity * share / total for one, share in shares.items()}
        giving = [one for one in usage if above[one] > 0 or one in saving]
        giving.sort(key=lambda one: (-max(0.0, above[one]), one not in saving))
        levels = [max(0.0, above[one]) for one in giving]
        steps = (level - after for level, after in zip(levels, [*levels[1:], 0.0], strict=True))
        return [(one, int(step)) for one, step in zip(giving, steps, strict=True)]


def quotas_of(url: StoreUrl) -> Quotas | None:
    """Returns the quotas of the parameter ``quota``: a share of every tenant's, or a file.

    Raises:
        ConfigurationError: the parameter is neither, or the file does not contain shares of
            tenants.
    """
    text = url.query.get("quota")
    if text is None:
        return None
    if (share := _share(text)) is not None:
        return Quotas(share)
    where = f"quota={text}"
    try:
        content = json.loads(Path(text).expanduser().read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: {error}; {_SHARE_FORM}, or a file") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{where}: a JSON object of tenants and shares is needed")
    shares: dict[bytes, float] = {}
    others = 0.0
    for tenant, given in content.items():
        share = _share(given) if isinstance(given, str) else None
        if share is None:
            raise ConfigurationError(f"{where}: {tenant!r:.80}: {_SHARE_FORM}, as text")
        if tenant == _OTHERS:
            others = share
        elif re.fullmatch(r"[0-9a-fA-F]{32}", tenant):
            shares[bytes.fromhex(tenant)] = share
        else:
            raise ConfigurationError(
                f"{where}: {tenant!r:.80}: give the 32 hexadecimal digits of a salt's digest, or "
                f"'{_OTHERS}' for all others"
            )
    return Quotas(others, shares)


def _share(text: str) -> float | None:
    match = _SHARE.fullmatch(text)
    if match is None:
        return None
    share = float(match[1]) / 100 if match[1] else float(match[2])
    return share if 0 <= share <= 1 else None
