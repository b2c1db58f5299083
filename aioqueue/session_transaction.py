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
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession

from .callers.refusal import refusal
from .claimed import Claimed
from .context import HeldSession, InTransaction
from .database import Database, NoFreeConnection
from .errors import ConfigurationError, TransactionViolation
from .identity import MARKER, ROLE, Identity
from .nested import Nesting
from .session_check import check_engine
from .session_driver import SET_BEFORE, Below, below
from .session_factory import AUTOCOMMIT, EngineSession, engine_of
from .session_guard import SWALLOWED, SessionConnection, SessionGuard
from .session_nested import PLAIN, NestedSession, named, runtime_text
from .settings import Settings
from .store import Store
from .terms import MISCONFIGURED, Terms, read_back, refusal_of_end

logger = logging.getLogger("aioqueue")

ABORTED = "25P02"
TRIES = 3
"""Connections that are tried: of those that died in the pool SQLAlchemy drops all, once one has shown."""
KEPT = "aioqueue: set when it was connected"


@functools.lru_cache(maxsize=100)
def _composed(kind: type[HeldSession[Any]], base: type[AsyncSession]) -> type[Any]:
    """Return the class of a task's session: what it says, with what the application's sessions have."""
    given: type[Any] = kind
    return given if issubclass(given, base) else type(kind.__name__, (given, base), {})


class OpenSession(NestedSession):
    """One transaction of a job in one session; ended by `finish` or `abort`, given back by `release`."""

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
        self._committing = False
        """Whether COMMIT is on its way: an error leaves open what became of it."""
        self._doubt = ""
        """What failed when the transaction was to be ended: its own constraints, the last statement, or nothing yet."""

    @classmethod
    async def check(cls, database: Database, store: Store, settings: Settings) -> EngineSession:
        """Look at a worker's start whether the engine's sessions can do it, and whose they are.

        Raises ConfigurationError where they cannot, psycopg.OperationalError where nobody answers.
        """
        return await check_engine(engine_of(settings.session), database, settings)

    # -- beginning -------------------------------------------------------------------------------------------------------

    async def begin(self, seconds: float) -> None:
        """Take a connection, and set the tenant with the first statement. Raises NoFreeConnection, ConfigurationError."""
        engine = engine_of(self._factory)
        last: BaseException | None = None
        for _ in range(TRIES):
            self._conn = SessionConnection(engine)
            await self._take()
            await self._make()
            try:
                await self._open(seconds)
            except BaseException as error:
                await self._give_up()
                await self.release()
                state = getattr(refusal(error), "sqlstate", "")
                if not isinstance(error, SQLAlchemyError | OSError) or state[:2] in MISCONFIGURED:
                    raise
                last = error
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

    async def _make(self) -> None:
        options = {**self._factory.kw, "bind": self._conn, "binds": None, "autobegin": True, "close_resets_only": False}
        try:
            self.face = _composed(self._kind, self._factory.class_)(**options)  # type: ignore[arg-type]
            self._below: Below = below(self._sync.connection)
            self._guard = SessionGuard(self._sync, self.face.sync_session, self._below)
        except BaseException:
            await AsyncConnection.close(self._conn)
            raise
        self._database.severed_with_jobs.add(self._below.sever)

    async def _open(self, seconds: float) -> None:
        conn, face = self._sync, self.face
        dialect: Any = conn.dialect
        version = dialect.server_version_info
        number = version[0] * 10000 + (version[1] if version[1:] else 0)
        values = self._terms.local_settings(seconds, server_version=number, foreign=True)
        async with self._as_runtime(self._settings.pool.deadline):
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
        nesting = Nesting(self._settings.tenants, self._job, self._identity, role=self._role, marker=self._terms.marker)
        nesting.on = self
        self._guard.let_user_code(nesting)
        InTransaction.__init__(face, self._job, nesting)

    # -- ending ----------------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Flush what is pending, in the time of user code; what fails is the job's failure."""
        self._guard.check()
        await self.face.flush()

    async def finish(self, result: str) -> None:
        """Record success and commit, together; see OpenTransaction.finish."""
        self._guard.check()
        expected = self._terms.expected(self._role, self._user)
        self._guard.last = partial(self._send_last, (*self._job.fence, expected, result))
        try:
            async with self._as_runtime(self._settings.pool.deadline):
                await AsyncSession.commit(self.face)
        except Exception as error:
            if not self._committing:
                raise self._meaning(error) from error
            # COMMIT was on its way.
            self._guard.ended = True
            await self._give_up()
            if await read_back(self._database, self._store, self._settings, self._job) != "succeeded":
                raise
            return
        self._guard.ended = True
        await AsyncSession.close(self.face)
        await self._clean()

    def _send_last(self, params: Sequence[object], conn: Connection) -> None:
        self._guard.close_cursors()
        self._doubt = "constraints"
        conn.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE", execution_options=PLAIN)
        self._doubt = "last"
        if self._identity.role is not None:
            leave = "SELECT pg_catalog.set_config(%s, pg_catalog.current_setting('role'), true)"
            conn.execute(runtime_text(leave), named([ROLE]), execution_options=PLAIN)
            conn.execute(
                runtime_text("SELECT pg_catalog.set_config('role', %s, true)"), named([self._role]), execution_options=PLAIN
            )
        conn.execute(runtime_text(self._store.sql["finish"].as_string(None)), named(params), execution_options=PLAIN)
        self._committing = True

    def _meaning(self, error: Exception) -> Exception:
        said = refusal(error)
        if said is None:
            return error
        if said.sqlstate == ABORTED:
            return TransactionViolation(SWALLOWED)
        if self._doubt == "last":
            if said.sqlstate == "42501":
                return TransactionViolation.by(
                    f"the role it changed to (SET ROLE), or the engine's own, may not end it: {said.message}"
                )
        return refusal_of_end(self._job, error, said.sqlstate, said.message, of_result=self._doubt == "last")

    async def left(self) -> bool:
        """Whether user code committed by itself: then nothing can undo what it wrote."""
        if self._guard.left:
            return True
        if self._guard.ended or self._guard.in_use or self._sync.closed or self._sync.invalidated or self._below.closed:
            return False
        if not self._below.in_transaction:
            return not self._guard.rolled_back
        with contextlib.suppress(Exception):
            async with self._as_runtime(self._settings.limits.rollback):
                row = await self._fetch("SELECT pg_catalog.current_setting(%s, true)", [MARKER])
                return bool(row[0] != self._terms.marker)
        return False

    async def abort(self, error: BaseException) -> None:
        """Roll back and scrub, within the rollback limit, or close the connection. Raises nothing but a cancellation."""
        if self._guard.ended:
            return
        self._guard.ended = True
        usable = not (
            self._guard.in_use or self._sync.closed or self._sync.invalidated or isinstance(error, TransactionViolation)
        )
        try:
            if usable:
                async with self._as_runtime(self._settings.limits.rollback):
                    await AsyncConnection.run_sync(self._conn, self._guard.close_cursors)
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
        self._guard.release()
        with contextlib.suppress(Exception):
            await AsyncConnection.close(self._conn)

    async def _clean(self) -> None:
        """Take away what the job left, or close the connection."""
        try:
            if not self._conn.handed_out:
                async with self._as_runtime(self._settings.limits.rollback):
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
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.limits.rollback):
                    await self._below.until_free()
        with contextlib.suppress(Exception):
            await AsyncConnection.run_sync(self._conn, self._guard.close_cursors)
        with contextlib.suppress(Exception):
            await AsyncConnection.invalidate(self._conn)

    # -- inside ----------------------------------------------------------------------------------------------------------

    @property
    def _sync(self) -> Connection:
        conn = self._conn.sync_connection
        assert conn is not None  # noqa: S101 - it has started
        return conn

    @contextlib.asynccontextmanager
    async def _as_runtime(self, seconds: float) -> AsyncIterator[None]:
        """Let the statements of this task through; shut the connection if the block takes longer."""
        timer = asyncio.get_running_loop().call_later(seconds, self._below.sever)
        try:
            with self._guard.as_runtime():
                yield
        finally:
            timer.cancel()
