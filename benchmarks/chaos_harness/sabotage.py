"""Broken copies of single rules; the harness (chaos.py) must catch every one of them.

A sabotage replaces parts of a function's text in the run's database, the floor's rule in this process, or a part of the
runtime in the worker processes. A pause in the
broken copy only widens the moment in which the broken order can be seen; in the right order it would do no harm.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

from psycopg import AsyncConnection
from psycopg.rows import TupleRow

from aioqueue import open_transaction, renew
from aioqueue.floor import LaneFloor, Snapshot
from aioqueue.sql import as_sql, functions

Changes = tuple[tuple[str, str], ...]


class NeverRewinds(LaneFloor[UUID]):
    """The end of a transaction that was set aside is ignored."""

    def _rewind(self, value: int) -> None:
        pass


class NeverWaits(LaneFloor[UUID]):
    """The floor moves up although transactions that were running then have not ended."""

    def observe(self, value: int, snapshot: Snapshot, now: float, taken: int = 0) -> None:
        super().observe(value, Snapshot(snapshot.xmax, frozenset()), now, taken)


@dataclass(frozen=True)
class Sabotage:
    """One broken rule: changes of functions by name, a floor, or a patch of the worker processes; and what shows it."""

    rule: str
    changes: Mapping[str, Changes] = field(default_factory=dict)
    floor: type[LaneFloor[UUID]] = LaneFloor
    patch: str = ""
    narrow: bool = False
    """Whether the engine shows it best with one lane."""
    kinds: frozenset[str] | None = None
    """The faults under which a storm of real processes shows it; None: the engine driven by hand shows it."""


def _share_identities() -> None:
    """A worker's identity is that of its host: all workers of this machine have one."""
    name = int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:7])
    cast("Any", renew).secrets = SimpleNamespace(randbits=lambda _: name)


def _read_nothing_back() -> None:
    """A COMMIT without an answer counts as good."""

    async def read_back(*_: object) -> str:
        return "succeeded"

    cast("Any", open_transaction).read_back = read_back


PATCHES = {"": lambda: None, "identity": _share_identities, "read-back": _read_nothing_back}


def patch(name: str) -> None:
    """Break this process, if it is to be."""
    PATCHES[name]()


_READ_V = "    FOR i IN 1..cardinality(p_lanes) LOOP\n        vts := vts || aioqueue.virtual_time(p_lanes[i]);\n    END LOOP;\n"
_FENCE = ((" AND l.worker = p_worker", ""),)

SABOTAGES: dict[str, Sabotage] = {
    "fence": Sabotage(
        "every write about a running job names the worker's identity",
        {"record": _FENCE, "finish": _FENCE},
    ),
    "xid-first": Sabotage(
        "enqueue takes its XID before it reads the virtual time",
        {
            "enqueue_many": (
                (
                    "    PERFORM pg_current_xact_id();\n",
                    "    PERFORM set_config('aioqueue_chaos.v', (SELECT jsonb_object_agg(x.lane, aioqueue.virtual_time(x.lane))"
                    " FROM (SELECT DISTINCT aioqueue.lane(e.v ->> 'queue', (e.v ->> 'priority')::integer) AS lane"
                    " FROM jsonb_array_elements(jobs) AS e (v)) x)::text, true);\n"
                    "    IF random() < 0.2 THEN PERFORM pg_sleep(1.5); END IF;\n    PERFORM pg_current_xact_id();\n",
                ),
            ),
            "next_tag": (
                (
                    "v      bigint := aioqueue.virtual_time(p_lane);",
                    "v      bigint := coalesce((nullif(pg_catalog.current_setting('aioqueue_chaos.v', true), '')::jsonb"
                    " ->> p_lane::text)::bigint, aioqueue.virtual_time(p_lane));",
                ),
            ),
        },
        narrow=True,
    ),
    "claim-lock": Sabotage(
        "a claim locks its own worker's row",
        {"claim": ((" FOR KEY SHARE;", ";"),)},
    ),
    "rescue-list": Sabotage(
        "a dead worker stays on the list until a pass finds nothing of it",
        {"rescue": (("IF moved = 0 AND NOT EXISTS (SELECT FROM aioqueue.live l WHERE l.worker = w) THEN", "IF true THEN"),)},
    ),
    "tick-order": Sabotage(
        "a tick reads the virtual times first, then the snapshot",
        {
            "tick": (
                (_READ_V, ""),
                ("    clock := clock_timestamp();\n", ""),
                (
                    " AS x), ',');\n",
                    " AS x), ',');\n    IF random() < 0.2 THEN PERFORM pg_sleep(0.6); END IF;\n"
                    f"{_READ_V}    clock := clock_timestamp();\n",
                ),
            ),
        },
        narrow=True,
    ),
    "new-position": Sabotage(
        "whatever makes a job ready again gives it a new position",
        {
            "return_job": (
                (
                    "    PERFORM aioqueue.make_ready(ARRAY[p_lane], ARRAY[p_row.job_id], ARRAY[p_row.tenant],"
                    " ARRAY[p_row.attempt],\n"
                    "                                ARRAY[p_row.spared + p_spare::integer]);\n",
                    "    INSERT INTO aioqueue.live (lane, vt, job_id, tenant, attempt, spared) VALUES (p_lane, p_row.vt,"
                    " p_row.job_id, p_row.tenant, p_row.attempt, p_row.spared + p_spare::integer);\n",
                ),
            ),
        },
    ),
    "early-rescue": Sabotage(
        "nobody is taken for dead before the lease ends",
        {"rescue": (("k.lease_until < clock_timestamp()", "k.lease_until < clock_timestamp() + interval '1.1 s'"),)},
    ),
    "floor-wait": Sabotage("a floor waits for every transaction that was running", floor=NeverWaits, narrow=True),
    "floor-rewind": Sabotage("a floor goes back when a transaction that was set aside ends", floor=NeverRewinds, narrow=True),
    "identity": Sabotage(
        "a worker's identity is a random number of its own",
        {
            "register_worker": (
                (
                    "at + make_interval(secs => p_lease));",
                    "at + make_interval(secs => p_lease)) ON CONFLICT (id) DO UPDATE"
                    " SET pid = excluded.pid, dead = false, lease_until = excluded.lease_until;",
                ),
            ),
        },
        patch="identity",
        kinds=frozenset({"kill"}),
    ),
    "read-back": Sabotage(
        "what became of a COMMIT without an answer is read back", patch="read-back", kinds=frozenset({"commit"})
    ),
    "losses-count": Sabotage(
        "an attempt that is lost with its worker counts",
        {"rescue_job": (("END, false, NULL);", "END, true, NULL);"),)},
        kinds=frozenset({"kill"}),
    ),
    "rescue": Sabotage(
        "jobs of the dead are taken over",
        {"rescue": (("(k.dead OR k.lease_until < clock_timestamp())", "false"),)},
        kinds=frozenset({"kill"}),
    ),
    "tenant": Sabotage(
        "a job runs for its own tenant",
        {"claim": (("nullif(r.tenant, '')", "reverse(nullif(r.tenant, ''))"),)},
        kinds=frozenset(),
    ),
}


async def install(conn: AsyncConnection[TupleRow], schema: str, sabotage: Sabotage) -> None:
    """Replace the functions by their broken copies. Raises LookupError when a text to be replaced is not there any more."""
    for name, changes in sabotage.changes.items():
        text = functions()[name]
        for old, new in changes:
            if old not in text:
                raise LookupError(f"{name}.sql no longer says {old!r}: bring the sabotage up to date")
            text = text.replace(old, new)
        await conn.execute(as_sql(text, schema))
