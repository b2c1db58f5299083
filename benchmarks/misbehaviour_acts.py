"""What a handler may do to its transaction: the acts that misbehaviours.py puts together at random, and what they must not reach.

Every statement says for whom it was issued, so that the database can compare that with the tenant in force (`audit.saw`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, LiteralString

import psycopg
from psycopg import AsyncConnection, AsyncTransaction
from psycopg.rows import dict_row, tuple_row
from psycopg.types.string import StrDumper

from aioqueue import JobTransaction

INSERT = "INSERT INTO shop.note (job, issuer, deed, body) VALUES (%s, %s, %s, 'x')"
READ = "SELECT audit.saw(%s, %s), (SELECT array_agg(DISTINCT n.tenant) FROM shop.note n)"
# What a job must not find on its connection; temporary tables, LISTEN, locks, held cursors, statements, settings of others.
LEFT_BEHIND = """
SELECT array_remove(ARRAY[
    (SELECT 'temporary ' || min(relname) FROM pg_catalog.pg_class WHERE relnamespace = pg_catalog.pg_my_temp_schema()),
    (SELECT 'channel ' || min(c) FROM pg_catalog.pg_listening_channels() c),
    (SELECT 'lock ' || min(objid::text) FROM pg_catalog.pg_locks
      WHERE locktype = 'advisory' AND pid = pg_catalog.pg_backend_pid()),
    (SELECT 'cursor ' || min(name) FROM pg_catalog.pg_cursors WHERE is_holdable),
    (SELECT 'statement ' || min(name) FROM pg_catalog.pg_prepared_statements WHERE from_sql),
    (SELECT 'setting ' || min(name) FROM pg_catalog.pg_settings WHERE source = 'session'
        AND name NOT LIKE '%%timeout' AND name <> 'row_security'),
    CASE WHEN current_user <> 'aioqueue_worker' THEN 'role ' || current_user END,
    CASE WHEN pg_catalog.current_setting('own.secret', true) <> '' THEN 'setting own.secret' END], NULL)
"""


@dataclass
class Handler:
    """One handler at work: for whom it issues statements, and what it was found to see."""

    tx: JobTransaction
    job: int
    tenant: str
    dice: random.Random
    wrongs: list[str]
    kept: list[asyncio.Task[None]]
    held: list[object]
    broke: bool = False
    """Whether it has taken its own tenant off, or made its transaction one that must not commit."""
    conn: AsyncConnection[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.conn = self.tx.connection

    async def write(self) -> None:
        """Write a row."""
        await psycopg.AsyncCursor(self.conn, row_factory=tuple_row).execute(INSERT, (self.job, self.tenant, self.broke))

    async def read(self) -> None:
        """Look whose rows are to be seen."""
        cursor = psycopg.AsyncCursor(self.conn, row_factory=tuple_row)
        row = await (await cursor.execute(READ, (self.tenant, self.broke))).fetchone()
        seen = set(row[1] or ()) if row else set()
        if not self.broke and not seen <= {self.tenant}:
            self.wrongs.append(f"handler {self.job} of {self.tenant} saw rows of {sorted(seen - {self.tenant})}")

    async def inspect(self) -> None:
        """Look for what others have left on the connection."""
        conn = self.conn
        if conn.row_factory is not tuple_row or conn._adapters or conn.prepare_threshold != 1:
            self.wrongs.append(f"handler {self.job} found a connection object that was changed")
        row = await (await psycopg.AsyncCursor(conn, row_factory=tuple_row).execute(LEFT_BEHIND)).fetchone()
        if row and row[0]:
            self.wrongs.append(f"handler {self.job} found on its connection: {', '.join(row[0])}")


Act = Callable[[Handler], Awaitable[object]]


def says(*texts: LiteralString) -> Act:
    """An act of statements."""

    async def act(handler: Handler) -> None:
        for text in texts:
            await handler.conn.execute(text)

    return act


async def factories(handler: Handler) -> None:
    """Change everything that a connection object lets itself be told."""

    class Shout(StrDumper):
        def dump(self, obj: str) -> bytes:
            return b"loud"

    conn: Any = handler.conn
    conn.row_factory = dict_row
    conn.adapters.register_dumper(float, Shout)
    conn.prepare_threshold = handler.dice.choice([None, 0, 9])
    conn.add_notice_handler(lambda _: None)


async def keep(handler: Handler) -> None:
    """Go on writing in a task that lives on, while others have the connection."""
    cursor = psycopg.AsyncCursor(handler.conn)
    times = handler.dice.randrange(3, 30)

    async def go_on() -> None:
        for _ in range(times):
            try:
                await cursor.execute(INSERT, (handler.job, handler.tenant, handler.broke))
            except Exception:  # refused, whatever the words
                await asyncio.sleep(0.001)
            else:
                await asyncio.sleep(0)

    handler.kept.append(asyncio.create_task(go_on()))


async def nested(handler: Handler) -> None:
    """Work for another tenant for a while, sometimes in vain."""
    own, handler.tenant = handler.tenant, f"t{handler.dice.randrange(50)}"
    try:
        with contextlib.suppress(ZeroDivisionError):
            async with handler.tx.tenant(handler.tenant):
                await handler.write()
                await handler.read()
                if handler.dice.random() < 0.5:
                    raise ZeroDivisionError
    finally:
        handler.tenant = own


async def savepoint(handler: Handler) -> None:
    """An error in a savepoint, and the tenant changed in one that is rolled back."""
    with contextlib.suppress(psycopg.Error):
        async with handler.conn.transaction():
            await handler.conn.execute("SET app.tenant = 'victim'")
            await handler.conn.execute("SELECT 1 / 0")


async def stream(handler: Handler) -> None:
    """Rows one by one, and a COPY."""
    async for _ in handler.conn.cursor().stream("SELECT * FROM generate_series(1, 3)"):
        pass
    async with handler.conn.cursor().copy("COPY (SELECT 1) TO STDOUT") as copy:
        async for _ in copy:
            pass


async def swallow(handler: Handler) -> None:
    """Go on after an error."""
    with contextlib.suppress(psycopg.Error):
        await handler.conn.execute("SELECT 1 / 0")


async def block(handler: Handler) -> None:
    """Enter a block and never leave it."""
    await AsyncTransaction(handler.conn).__aenter__()


async def pipeline(handler: Handler) -> None:
    """Begin a pipeline and never end it."""
    opened: Any = handler.conn.pipeline()
    handler.held.append(opened)  # Python would end what nobody refers to, and all would be well
    await opened.__aenter__()
    await handler.conn.execute("SELECT 1")


async def close(handler: Handler) -> None:
    """Close the connection."""
    await handler.conn.close()


async def sleep(handler: Handler) -> None:
    """Leave a statement under way."""
    handler.kept.append(asyncio.create_task(_quiet(handler.conn.execute("SELECT pg_sleep(2)"))))
    await asyncio.sleep(0)


async def _quiet(call: Awaitable[object]) -> None:
    with contextlib.suppress(psycopg.Error, RuntimeError):
        await call


LEAVES: dict[str, Act] = {
    "search_path": says("SET search_path = shop, pg_temp"),
    "settings": says("SET own.secret = 'a'", "SET TimeZone = 'Asia/Tokyo'", "SET default_transaction_isolation = 'serializable'"),
    "set_config": says("SELECT set_config('own.secret', 'a', false), set_config('statement_timeout', '1h', false)"),
    "temporary table": says("CREATE TEMP TABLE IF NOT EXISTS note AS SELECT n FROM generate_series(1, 200) n"),
    "shadows": says("CREATE TEMP TABLE IF NOT EXISTS live (id int)", "CREATE TEMP TABLE IF NOT EXISTS jsonb (id int)"),
    "LISTEN": says("LISTEN left_behind", "NOTIFY left_behind"),
    "advisory locks": says("SELECT pg_advisory_lock_shared(1)"),
    "cursor with hold": says("CLOSE ALL", "DECLARE left_open CURSOR WITH HOLD FOR SELECT 1"),
    "PREPARE": says("DEALLOCATE ALL", "PREPARE left_behind AS SELECT 1"),
    "role": says("SET ROLE aioqueue_worker", "RESET ROLE"),
    "factories": factories,
    "kept": keep,
    "nested": nested,
    "savepoint": savepoint,
    "stream": stream,
}
LAST = "under way"
"""The act after which a handler does no more."""
ALONE = ("nested", "savepoint")
"""Acts that change the tenant for a while; beside a task that goes on ("kept") it would not be known whose a statement is."""
BREAKS: dict[str, Act] = {
    "COMMIT": says("COMMIT"),
    "ROLLBACK": says("ROLLBACK"),
    "COMMIT AND CHAIN": says("COMMIT AND CHAIN"),
    "COMMIT; BEGIN": says("COMMIT; BEGIN"),
    "COMMIT as another": says("COMMIT; SET app.tenant = 'victim'; BEGIN"),
    "SET tenant": says("SET app.tenant = 'victim'"),
    "SET LOCAL tenant": says("SET LOCAL app.tenant = 'victim'"),
    "set_config tenant": says("SELECT set_config('app.tenant', 'victim', false)"),
    "RESET tenant": says("RESET app.tenant"),
    "RESET ALL": says("RESET ALL"),
    "row_security": says("SET row_security = off"),
    "SET ROLE": says("SET ROLE aioqueue_worker"),
    "swallowed": swallow,
    "block left open": block,
    "pipeline left open": pipeline,
    "closed": close,
    LAST: sleep,
}
