"""The order in which the disk store drops blocks for room, with and without quotas of tenants.

Everything here happens inside a write transaction of the index.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from kvconnect.backends.disk.damage import whole_numbers
from kvconnect.backends.disk.files.direct_io import Location
from kvconnect.backends.quotas import Quotas
from kvconnect.keys import BlockKey

TENANT = "CASE length(namespace) WHEN 48 THEN substr(namespace, 33) ELSE x'' END"
"""The SQL expression of a block's tenant, equal to `kvconnect.backends.quotas.tenant_of`."""

_NEW, _OLD = (TENANT.replace("namespace", f"{row}.namespace") for row in ("new", "old"))

# Older versions leave both alone, and drop blocks as if there were no quotas.
_SCHEMA = (
    # The tenants whose blocks are being written to reserved slots.
    """CREATE TABLE IF NOT EXISTS saving(
    segment INTEGER, slot INTEGER, tenant BLOB, PRIMARY KEY(segment, slot)) WITHOUT ROWID""",
    f"""CREATE INDEX IF NOT EXISTS blocks_by_tenant
    ON blocks(({TENANT}), size, pinned, priority, used)""",
    """DELETE FROM saving WHERE NOT EXISTS (SELECT 1 FROM reserved AS r
    WHERE r.segment = saving.segment AND r.slot = saving.slot)""",
    # The bytes of each tenant's slots, and the newest block that is counted in them.
    "CREATE TABLE IF NOT EXISTS tenants(tenant BLOB PRIMARY KEY, nbytes INTEGER) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS counted(newest INTEGER)",
)
# Every connection that knows of the tables counts what it changes. The triggers are its own: the
# index has none.
_COUNTING = (
    f"""CREATE TEMP TRIGGER count_saved AFTER INSERT ON main.blocks BEGIN
    INSERT INTO tenants VALUES({_NEW}, new.size)
        ON CONFLICT(tenant) DO UPDATE SET nbytes = nbytes + excluded.nbytes;
    UPDATE counted SET newest = max(newest, new.id);
    END""",  # noqa: S608 - a constant
    f"""CREATE TEMP TRIGGER count_dropped AFTER DELETE ON main.blocks BEGIN
    UPDATE tenants SET nbytes = nbytes - old.size WHERE tenant = {_OLD};
    DELETE FROM tenants WHERE tenant = {_OLD} AND nbytes <= 0;
    END""",  # noqa: S608 - a constant
)
_COUNT_ALL = (
    "DELETE FROM tenants",
    f"INSERT INTO tenants SELECT {TENANT}, sum(size) FROM blocks GROUP BY 1",  # noqa: S608 - a constant
    "DELETE FROM counted",
    "INSERT INTO counted SELECT coalesce(max(id), 0) FROM blocks",
)
_IS_COUNTED = """SELECT 1 FROM counted
    WHERE newest >= (SELECT coalesce(max(id), 0) FROM blocks)"""
# Older versions drop blocks uncounted. Counting a million takes some 0.3 s.
_COUNT_S = 600.0
_USAGE = (
    "SELECT tenant, nbytes FROM tenants",
    """SELECT tenant, sum(size) FROM saving JOIN reserved USING(segment, slot)
    JOIN segments ON segments.id = segment GROUP BY 1""",
)
# Not the greatest number that the index takes, but far in the future.
_LATEST = 1 << 62


@dataclass(frozen=True, slots=True)
class Victim:
    """A block that is dropped."""

    id: int
    key: bytes
    location: Location
    parent: bytes | None
    used: int


class Eviction:
    """Chooses and drops blocks.

    Args:
        db: the index's connection, which must be in a write transaction when a method is called.
        quotas: the tenants' shares; ``None``: all blocks are alike.
    """

    def __init__(self, db: sqlite3.Connection, quotas: Quotas | None) -> None:
        self._db = db
        self._quotas = quotas
        self._counted_at = -inf

    def prepare(self) -> None:
        """Adds to the index what quotas need, if there are any; counts for those of others."""
        if self._quotas is not None:
            for statement in _SCHEMA:
                self._db.execute(statement)
        has_tenants = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = 'tenants'"
        if self._db.execute(has_tenants).fetchone() is not None:
            for statement in _COUNTING:
                self._db.execute(statement)

    def begin_saving(self, slots: Iterable[tuple[int, int, bytes]]) -> None:
        """Counts reserved slots, as (segment, slot, tenant), as their tenants'."""
        if self._quotas is not None:
            self._db.executemany("INSERT OR REPLACE INTO saving VALUES(?, ?, ?)", slots)

    def end_saving(self, slots: Iterable[tuple[int, int]]) -> None:
        """Ends `begin_saving` of slots that are no longer reserved."""
        if self._quotas is not None:
            self._db.executemany("DELETE FROM saving WHERE segment=? AND slot=?", slots)

    def usage(self, saving: Mapping[bytes, int]) -> dict[bytes, int] | None:
        """Returns the bytes of slots that each tenant takes, `saving` included.

        Without quotas it returns ``None``.
        """
        if self._quotas is None:
            return None
        self._count()
        taken = Counter(saving)
        for query in _USAGE:
            rows: list[tuple[bytes, int]] = self._db.execute(query).fetchall()
            whole_numbers([(nbytes,) for _, nbytes in rows])
            taken.update(dict(rows))
        return {tenant: nbytes for tenant, nbytes in taken.items() if nbytes > 0}

    def _count(self) -> None:
        """Counts the tenants' bytes anew, if some connection does not, or may have not."""
        now = time.monotonic()
        if now - self._counted_at < _COUNT_S and self._db.execute(_IS_COUNTED).fetchone():
            return
        for statement in _COUNT_ALL:
            self._db.execute(statement)
        self._counted_at = now

    def givers(
        self, usage: Mapping[bytes, int] | None, capacity: int, saving: Collection[bytes]
    ) -> list[tuple[bytes, int]] | None:
        """Returns the tenants whose blocks may be dropped, see `Quotas.givers`; ``None``: all."""
        if self._quotas is None or usage is None:
            return None
        return self._quotas.givers(usage, capacity, saving)

    def victims(
        self,
        size: int,
        wanted: int,
        keep: Collection[BlockKey | None],
        givers: Sequence[tuple[bytes, int]] | None,
        usage: dict[bytes, int] | None,
    ) -> list[Victim]:
        """Returns up to `wanted` blocks in slots of `size` bytes to drop next, all of one giver.

        They are ordered so that children precede their parents. The blocks `keep` are not dropped.
        Afterwards `usage` no longer counts the victims.
        """
        if givers is None or usage is None:
            return self._oldest(size, wanted, keep, None)
        for tenant, step in givers:
            most = min(wanted, max(1, -(-step // size)))
            if found := self._oldest(size, most, keep, tenant):
                usage[tenant] -= size * len(found)
                if usage[tenant] <= 0:
                    del usage[tenant]
                return found
        return []

    def drop(self, victims: Sequence[Victim]) -> None:
        """Deletes the rows of `victims`; afterwards their slots are neither free nor reserved."""
        self._db.executemany("DELETE FROM blocks WHERE id=?", [(victim.id,) for victim in victims])
        # The parents are now the ends of the chains. They count as used after the victims.
        gone = {victim.key for victim in victims}
        ends = [
            (min(v.used, _LATEST) + 1, v.parent)
            for v in victims
            if v.parent and v.parent not in gone
        ]
        self._db.executemany("UPDATE blocks SET used=max(used, ?) WHERE key=?", ends)

    def _oldest(
        self, size: int, wanted: int, keep: Collection[BlockKey | None], tenant: bytes | None
    ) -> list[Victim]:
        """Returns the least recently used blocks, low priority before high, of `tenant` if given.

        Iterates over the blocks by priority and use. That is nearly the order of eviction, since
        the end of a chain counts as older than its beginning. A block that is reached before its
        last child is postponed until after that child.
        """
        only = "" if tenant is None else f" AND {TENANT} = ?"
        rows = self._db.execute(
            "SELECT id, key, segment, slot, parent, used,"  # noqa: S608 - constants
            " (SELECT count(*) FROM blocks WHERE parent = b.key)"
            f" FROM blocks AS b WHERE size=? AND pinned=0{only} ORDER BY priority, used",
            (size,) if tenant is None else (size, tenant),
        )
        victims: list[Victim] = []
        waiting: dict[bytes, tuple[Victim, int]] = {}
        dropped: Counter[bytes] = Counter()
        for block, key, segment, slot, parent, used, children in rows:
            if key in keep:
                continue
            whole_numbers([(segment, slot, used)])
            waiting[key] = (
                Victim(block, key, Location(segment, slot, size), parent, used),
                children,
            )
            following: bytes | None = key
            while following in waiting and waiting[following][1] == dropped[following]:
                victim, _ = waiting.pop(following)
                victims.append(victim)
                if len(victims) == wanted:
                    rows.close()
                    return victims
                following = victim.parent
                if following is not None:
                    dropped[following] += 1
        return victims
