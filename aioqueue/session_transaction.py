"""One transaction of a job in an AsyncSession: from its first statement, which sets the tenant, to a fenced one and COMMIT.

What open_transaction.py does on a connection of aioqueue's own, this does on one of the application's pool: begun by the
session itself, guarded by SQLAlchemy's events, ended by the session's commit, then scrubbed. Raises, and decides no outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import psycopg
from sqlalchemy import Connection, event
from sqlalchemy.engine.interfaces import PoolProxiedConnection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from .callers.caller import Statement
from .callers.refusal import refusal
from .callers.sqlalchemy import as_text
from .context import HeldSession, InTransaction
from .database import Database, NoFreeConnection
from .errors import ConfigurationError, InvalidResult, LeaseLost, TransactionViolation
from .identity import MARKER, ROLE, Identity
from .job import Claimed
from .job_connection import LEFT
from .nested import Nesting
from .pooler import SESSION
from .session_check import check_engine
from .session_driver import SET_BEFORE, Below, below
from .session_factory import AUTOCOMMIT, engine_of
from .settings import Settings
from .store import NOT_OWNED, REFUSED, VIOLATION, Store
from .terms import Terms, read_back

logger = logging.getLogger("aioqueue")

ENDS = (
    "{} is not the task's to call: aioqueue commits a job's session when the task returns, and rolls it back when it raises; "
    "what may fail goes into 'async with session.begin_nested():'"
)
SWALLOWED = (
    "a statement failed in the job's transaction and the task went on: let the error out, or put what may fail into a savepoint "
    "(async with session.begin_nested())"
)
ABORTED = "25P02"
MISCONFIGURED = ("22", "42")
"""Classes of SQLSTATE of a beginning that no other connection would make better: a role or setting that cannot be had."""
TRIES = 3
"""Connections that are tried: of those that died in the pool SQLAlchemy drops all, once one has shown."""
KEPT = "aioqueue: set when it was connected"
ENDING = ("begin", "begin_twophase", "close", "commit", "detach", "rollback")
"""Methods of SQLAlchemy's blocking connection that user code finds below, and must not call; the session needs none of them."""
PLAIN = {"stream_results": False, "yield_per": None}
"""Whatever user code has set for the connection's statements."""


def _refuse(what: str, *_: object, **__: object) -> NoReturn:
    raise TransactionViolation(ENDS.format(what))


def _broke(what: str) -> TransactionViolation:
    return TransactionViolation(f"the task broke its transaction: {what}")


@functools.lru_cache(maxsize=100)
def _text(statement: str) -> Any:
    return as_text(Statement(tuple(statement.split("%s"))))


def _named(params: Sequence[object]) -> dict[str, object]:
    return {f"p{number}": value for number, value in enumerate(params, 1)}


@functools.lru_cache(maxsize=100)
def _composed(kind: type[HeldSession[Any]], base: type[AsyncSession]) -> type[Any]:
    """Return the class of a task's session: what it says, with what the application's sessions have."""
    given: type[Any] = kind
    return given if issubclass(given, base) else type(kind.__name__, (given, base), {})


class SessionConnection(AsyncConnection):
    """The connection that user code finds below its session; what would end the transaction is refused."""

    handed_out = False
    """Whether user code has had the driver's own connection: what it did there is not seen, and it may have kept it."""

    async def get_raw_connection(self) -> PoolProxiedConnection:
        """Return the driver's connection; it is closed when the job ends."""
        self.handed_out = True
        return await super().get_raw_connection()

    def begin(self) -> NoReturn:
        """Refused: the transaction has begun."""
        raise TransactionViolation(ENDS.format("begin()"))

    async def commit(self) -> None:
        """Refused."""
        raise TransactionViolation(ENDS.format("commit()"))

    async def rollback(self) -> None:
        """Refused."""
        raise TransactionViolation(ENDS.format("rollback()"))

    async def close(self) -> None:
        """Refused."""
        raise TransactionViolation(ENDS.format("close()"))

    async def aclose(self) -> None:
        """Refused."""
        raise TransactionViolation(ENDS.format("aclose()"))

    async def invalidate(self, exception: BaseException | None = None) -> None:
        """Refused."""
        raise TransactionViolation(ENDS.format("invalidate()"))


class OpenSession:
    """One transaction of a job in one session; ended by `finish` or `abort`, given back by `release`."""

    face: Any
    """The session that user code is given; there once it has begun."""

    def __init__(
        self,
        database: Database,
        store: Store,
        settings: Settings,
        job: Claimed,
        identity: Identity,
        kind: type[HeldSession[Any]],
    ) -> None:
        assert settings.session is not None  # noqa: S101 - without it no such task is registered
        self._database = database
        self._store = store
        self._settings = settings
        self._factory = settings.session
        self._job = job
        self._identity = identity
        self._kind = kind
        self._terms = Terms(job, identity, settings)
        self._role = "none"
        self._user = ""
        self._before: dict[str, str] = {}
        """What the application has set on the connection."""
        self._nesting: Nesting | None = None
        self._runtime: asyncio.Task[Any] | None = None
        """The task that sends statements of the runtime's own at this moment."""
        self._user_of_it: asyncio.Task[Any] | None = None
        """The task of user code that has a statement under way."""
        self._cursors: list[Any] = []
        """Those of streams: one that was kept would read in the next transaction of its connection."""
        self._last: Callable[[Connection], None] | None = None
        """Sends the last statement: called by the session's commit, right before COMMIT."""
        self._begun = self._left = self._rolled_back = self._ended = self._committing = False
        self._doubt = ""
        """What failed when the transaction was to be ended: its own constraints, the last statement, or nothing yet."""

    @classmethod
    async def check(cls, database: Database, store: Store, settings: Settings) -> None:
        """Look at a worker's start whether the engine's sessions can do it.

        Raises ConfigurationError where they cannot, psycopg.OperationalError where nobody answers.
        """
        await check_engine(engine_of(settings.session), database, settings)

    # -- beginning -------------------------------------------------------------------------------------------------------

    async def begin(self, seconds: float) -> None:
        """Take a connection, and set the tenant with the first statement. Raises NoFreeConnection, ConfigurationError."""
        engine = engine_of(self._factory)
        last: BaseException | None = None
        for _ in range(TRIES):
            self._conn = SessionConnection(engine)
            await self._take()
            try:
                await self._open(seconds)
            except BaseException as error:
                await self._give_up()
                await self.release()
                state = getattr(refusal(error), "sqlstate", "")
                if not isinstance(error, SQLAlchemyError | OSError) or state[:2] in MISCONFIGURED:
                    raise
                last = error
                self._begun = self._left = self._rolled_back = False
            else:
                return
        raise NoFreeConnection(f"the job's transaction could not be opened: {last}") from last

    async def _take(self) -> None:
        wait = max(self._settings.limits.transaction_wait, self._settings.pool.acquire_timeout)
        self._database.waiting += 1
        try:
            async with asyncio.timeout(wait):
                await self._conn.start()
        except TimeoutError:
            raise NoFreeConnection(f"no connection of the session's engine was free for a job within {wait:g} s") from None
        except Exception as error:
            raise NoFreeConnection(f"no connection of the session's engine: {error}") from error
        finally:
            self._database.waiting -= 1

    async def _open(self, seconds: float) -> None:
        conn = self._sync
        self._below: Below = below(conn.connection)
        self._database.severed_with_jobs.add(self._below.sever)
        options = {**self._factory.kw, "bind": self._conn, "binds": None, "autobegin": True, "close_resets_only": False}
        face = self.face = _composed(self._kind, self._factory.class_)(**options)  # type: ignore[arg-type]
        guards: dict[str, Callable[..., Any]] = {
            "begin": self._on_begin,
            "commit": self._on_commit,
            "rollback": self._on_rollback,
            "before_cursor_execute": self._before_statement,
            "after_cursor_execute": self._after_statement,
        }
        for name, guard in guards.items():
            event.listen(conn, name, guard)
        event.listen(face.sync_session, "after_begin", self._after_begin)
        dialect: Any = conn.dialect
        version = dialect.server_version_info
        values = self._terms.local_settings(seconds, server_version=version[0] * 10000 + (version[1] if version[1:] else 0))
        values["client_connection_check_interval"] = SESSION["client_connection_check_interval"]
        async with self._deadline(self._settings.pool.deadline), self._as_runtime():
            await AsyncSession.connection(face)  # it begins of itself
            if KEPT not in conn.info:
                found = await self._fetch(f"SELECT current_setting('role'), ({SET_BEFORE})::pg_catalog.text")
                role = {} if found[0] == "none" else {"role": found[0]}
                conn.info[KEPT] = {**json.loads(found[1] or "{}"), **role}
            self._before = conn.info[KEPT]
            calls = ", ".join(["pg_catalog.set_config(%s, %s, true)"] * len(values))
            row = await self._fetch(
                "SELECT pg_catalog.current_setting('role'), pg_catalog.current_setting('session_authorization'), " + calls,
                [part for pair in values.items() for part in pair],
            )
            self._role, self._user = row[0], row[1]
            if self._identity.role is not None:
                await self.set_role(self._identity.role)
        if not self._below.in_transaction:
            raise ConfigurationError(AUTOCOMMIT)
        self._nesting = Nesting(self._settings.tenants, self._job, self._identity, role=self._role, marker=self._terms.marker)
        self._nesting.on = self
        for name in ENDING:
            setattr(conn, name, partial(_refuse, f"{name}()"))
        InTransaction.__init__(face, self._job, self._nesting)

    # -- what nested tenants are made of ---------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def savepoint(self) -> AsyncIterator[None]:
        """Open one, with an identity map of its own: what was loaded for one tenant is not found by another."""
        face = self.face
        await face.flush()
        outer = list(face.sync_session)
        face.expunge_all()
        try:
            async with face.begin_nested():
                await AsyncSession.connection(face)  # SAVEPOINT is sent with the first use of it
                yield
        finally:
            face.expunge_all()
            face.add_all(outer)

    async def switch_local(self, names: Sequence[str], values: Mapping[str, str]) -> Sequence[str | None]:
        """Flush what is the tenant's so far, then read and set; see nested.py."""
        await self.face.flush()
        calls = ", ".join(["pg_catalog.set_config(%s, %s, true)"] * len(values))
        reads = ", ".join(["pg_catalog.current_setting(%s, true)"] * len(names))
        params = [part for pair in values.items() for part in pair] + list(names)
        async with self._as_runtime():
            row = await self._fetch(f"SELECT s.*, {calls} FROM (SELECT {reads} OFFSET 0) s", params)  # noqa: S608 - fixed parts
        return list(row)[: len(names)]

    async def set_role(self, role: str) -> None:
        """Take a role for the rest of the transaction."""
        async with self._as_runtime():
            await self._fetch("SELECT pg_catalog.set_config('role', %s, true)", [role])

    # -- ending ----------------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Flush what is pending, in the time of user code; what fails is the job's failure."""
        self._check()
        await self.face.flush()

    async def finish(self, result: str) -> None:
        """Record success and commit, together; see OpenTransaction.finish."""
        self._check()
        expected = json.dumps(self._terms.expected(self._role, self._user))
        self._last = partial(self._send_last, (*self._job.fence, expected, result))
        try:
            async with self._deadline(self._settings.pool.deadline), self._as_runtime():
                await AsyncSession.commit(self.face)
        except Exception as error:
            if not self._committing:
                raise self._meaning(error) from error
            # COMMIT was on its way.
            self._ended = True
            await self._give_up()
            if await read_back(self._database, self._store, self._settings, self._job) != "succeeded":
                raise
            return
        self._ended = True
        await AsyncSession.close(self.face)
        await self._clean()

    def _send_last(self, params: Sequence[object], conn: Connection) -> None:
        self._close_cursors()
        self._doubt = "constraints"
        conn.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE", execution_options=PLAIN)
        self._doubt = "last"
        if self._identity.role is not None:
            leave = "SELECT pg_catalog.set_config(%s, pg_catalog.current_setting('role'), true)"
            conn.execute(_text(leave), _named([ROLE]), execution_options=PLAIN)
            conn.execute(_text("SELECT pg_catalog.set_config('role', %s, true)"), _named([self._role]), execution_options=PLAIN)
        conn.execute(_text(self._store.sql["finish"].as_string(None)), _named(params), execution_options=PLAIN)
        self._committing = True

    def _meaning(self, error: Exception) -> Exception:
        said = refusal(error)
        if said is None:
            return error
        if said.sqlstate == NOT_OWNED:
            return LeaseLost(self._job.job_id)
        if said.sqlstate == VIOLATION:
            return TransactionViolation(said.message)
        if said.sqlstate == ABORTED:
            return TransactionViolation(SWALLOWED)
        if self._doubt == "last":
            if said.sqlstate == "42501":
                return _broke(f"the role it changed to (SET ROLE), or the engine's own, may not end it: {said.message}")
            if said.sqlstate[:2] in REFUSED:
                return InvalidResult(self._job.task, f"PostgreSQL refuses it: {said.message}")
        return error

    def _check(self) -> None:
        session, conn = self.face.sync_session, self._sync
        if self._left:
            raise TransactionViolation(LEFT)
        if conn.closed:
            raise _broke("it closed its connection")
        if conn.invalidated:
            raise psycopg.OperationalError("the connection of the job's transaction was lost")
        if self._nesting is not None and self._nesting.broken is not None:
            raise self._nesting.broken
        if self._in_use:
            raise _broke(
                "it ended while a statement was under way in it, in another task that was not awaited: one task at a time uses "
                "a session"
            )
        begun = conn.get_transaction()
        if not session.is_active or (begun is not None and not begun.is_active):
            raise TransactionViolation(SWALLOWED)
        if self._rolled_back or begun is None or not session.in_transaction():
            raise TransactionViolation(LEFT)
        if session.in_nested_transaction() or conn.in_nested_transaction():
            raise _broke("it left a begin_nested() block open")

    async def left(self) -> bool:
        """Whether user code committed by itself: then nothing can undo what it wrote."""
        if self._left:
            return True
        if self._ended or self._in_use or self._sync.closed or self._sync.invalidated or self._below.closed:
            return False
        if not self._below.in_transaction:
            return not self._rolled_back
        with contextlib.suppress(Exception):
            async with self._deadline(self._settings.limits.rollback), self._as_runtime():
                row = await self._fetch("SELECT pg_catalog.current_setting(%s, true)", [MARKER])
                return bool(row[0] != self._terms.marker)
        return False

    async def abort(self, error: BaseException) -> None:
        """Roll back and scrub, within the rollback limit, or close the connection. Raises nothing but a cancellation."""
        if self._ended:
            return
        self._ended = True
        usable = not (self._in_use or self._sync.closed or self._sync.invalidated or isinstance(error, TransactionViolation))
        try:
            if usable:
                async with self._deadline(self._settings.limits.rollback), self._as_runtime():
                    await AsyncConnection.run_sync(self._conn, self._close_cursors)
                    await AsyncSession.close(self.face)
                    if self._below.in_transaction:
                        # SQLAlchemy rolls back nothing whose commit has failed.
                        await AsyncConnection.run_sync(self._conn, lambda conn: conn.connection.rollback())
                if not self._below.in_transaction:
                    await self._clean()
                    return
        except Exception as failed:
            logger.debug("rollback of job %s failed, its connection is closed: %s", self._job.job_id, failed)
        except BaseException:
            await self._give_up()
            raise
        await self._give_up()

    async def release(self) -> None:
        """Give the connection back to its pool."""
        self._database.severed_with_jobs.discard(self._below.sever)
        for name in ENDING:
            vars(self._sync).pop(name, None)
        with contextlib.suppress(Exception):
            await AsyncConnection.close(self._conn)

    async def _clean(self) -> None:
        """Take away what the job left, or close the connection."""
        try:
            if not self._conn.handed_out:
                async with self._deadline(self._settings.limits.rollback):
                    if await self._below.scrub(self._store.sql["scrub"].as_string(None), self._before):
                        return
        except Exception as error:
            logger.debug("the scrub after job %s failed, its connection is closed: %s", self._job.job_id, error)
        except BaseException:
            await self._give_up()
            raise
        await self._give_up()

    async def _give_up(self) -> None:
        """Close the connection for good; its pool opens another one."""
        if not self._sync.closed:
            self._below.sever()
        with contextlib.suppress(Exception):
            await AsyncConnection.run_sync(self._conn, self._close_cursors)
        with contextlib.suppress(Exception):
            await AsyncConnection.invalidate(self._conn)

    def _close_cursors(self, *_: object) -> None:
        cursors, self._cursors = self._cursors, []
        for cursor in cursors:
            with contextlib.suppress(Exception):
                cursor.close()

    # -- guards ----------------------------------------------------------------------------------------------------------

    @property
    def _sync(self) -> Connection:
        conn = self._conn.sync_connection
        assert conn is not None  # noqa: S101 - it has started
        return conn

    @property
    def _in_use(self) -> bool:
        """Whether another task of user code has a statement under way."""
        task = self._user_of_it
        return task is not None and not task.done() and task is not asyncio.current_task()

    def _on_begin(self, _conn: Connection) -> None:
        if self._begun:
            raise TransactionViolation(LEFT)
        self._begun = True

    def _on_commit(self, conn: Connection) -> None:
        last, self._last = self._last, None
        if last is None:
            raise TransactionViolation(ENDS.format("commit()"))
        last(conn)

    def _on_rollback(self, _conn: Connection) -> None:
        # By user code around the session, or by a flush that has failed.
        self._rolled_back = True

    def _after_begin(self, _session: object, _transaction: object, connection: Connection) -> None:
        if connection is not self._sync:
            raise _broke("its session took a second connection, which would not be in the job's transaction")

    def _before_statement(self, *_: object) -> None:
        task = asyncio.current_task()
        if task is self._runtime:
            return
        if self._ended or self._left or self._runtime is not None:
            raise TransactionViolation(LEFT if self._left else "the job's transaction is ending, and takes no more statements")
        if self._nesting is not None:
            self._nesting.check()
        if self._in_use and self._nesting is not None:
            self._nesting.broken = _broke("two of its tasks used the session at once: let one after the other use it")
            raise self._nesting.broken
        self._user_of_it = task

    def _after_statement(self, _conn: object, cursor: Any, _text: str, _params: object, context: object, _many: bool) -> None:
        if asyncio.current_task() is self._user_of_it:
            self._user_of_it = None
        if getattr(context, "_is_server_side", False):
            self._cursors.append(cursor)
        if not self._below.in_transaction and self._nesting is not None:
            self._left = True
            raise TransactionViolation(LEFT)

    # -- inside ----------------------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _as_runtime(self) -> AsyncIterator[None]:
        """Let the statements of this task through."""
        before, self._runtime = self._runtime, asyncio.current_task()
        try:
            yield
        finally:
            self._runtime = before

    @contextlib.asynccontextmanager
    async def _deadline(self, seconds: float) -> AsyncIterator[None]:
        timer = asyncio.get_running_loop().call_later(seconds, self._below.sever)
        try:
            yield
        finally:
            timer.cancel()

    async def _fetch(self, statement: str, params: Sequence[object] = ()) -> Sequence[Any]:
        result = await AsyncConnection.execute(self._conn, _text(statement), _named(params), execution_options=PLAIN)
        return result.one()
