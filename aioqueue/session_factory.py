"""What `AioQueue(session=)` takes, checked where it is given; imports no SQLAlchemy, which its giver has imported.

Opens nothing: session_transaction.py does.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, Protocol

from .errors import ConfigurationError

DRIVERS = ("psycopg", "psycopg_async", "asyncpg")
FIX = "AioQueue(session=async_sessionmaker(create_async_engine('postgresql+psycopg://…')))"


class AwaitedSession(Protocol):
    """As much of SQLAlchemy's AsyncSession as tells it from a session that blocks."""

    @property
    def sync_session(self) -> Any:
        """The session below."""
        ...


class SessionFactory(Protocol):
    """SQLAlchemy's async_sessionmaker, of whatever class of sessions."""

    @property
    def class_(self) -> type[AwaitedSession]:
        """The class of its sessions."""
        ...

    @property
    def kw(self) -> dict[str, Any]:
        """What they are made with."""
        ...


class EngineSession(NamedTuple):
    """As whom a session of the engine begins, and for which tenant."""

    role: str
    tenant: str
    """The value of the tenant setting before anybody has set it; empty: none."""


def check_factory(given: object) -> SessionFactory:
    """Return an async_sessionmaker, or raise ConfigurationError with what to give instead.

    One without an engine is let pass: `configure(bind=…)` may come later; a worker's start looks again.
    """
    asyncio_part: Any = sys.modules.get("sqlalchemy.ext.asyncio")
    factory: Any = given
    if asyncio_part is None or not isinstance(given, asyncio_part.async_sessionmaker):
        what = f"the class {given.__qualname__}" if isinstance(given, type) else type(given).__qualname__
        raise ConfigurationError(f"session: expected SQLAlchemy's async_sessionmaker, got {what}: {FIX}")
    if factory.kw.get("bind") is not None:
        engine_of(factory)
    return factory  # type: ignore[no-any-return]


def engine_of(factory: SessionFactory | None) -> Any:
    """Return the AsyncEngine of its sessions. Raises ConfigurationError where a job's transaction could not be had of it."""
    asyncio_part: Any = sys.modules["sqlalchemy.ext.asyncio"]
    if factory is None:
        raise ConfigurationError(f"session: expected SQLAlchemy's async_sessionmaker, got none: {FIX}")
    engine: Any = factory.kw.get("bind")
    if not isinstance(engine, asyncio_part.AsyncEngine):
        got = "none" if engine is None else type(engine).__qualname__
        raise ConfigurationError(f"session: expected a factory bound to an AsyncEngine, got {got}: {FIX}")
    if engine.dialect.name != "postgresql" or engine.dialect.driver not in DRIVERS:
        raise ConfigurationError(
            f"session: expected an engine of postgresql+psycopg or postgresql+asyncpg, got {engine.dialect.name}+"
            f"{engine.dialect.driver}"
        )
    if factory.kw.get("binds"):
        raise ConfigurationError("session: a job's transaction is on one connection: give bind=, not binds=")
    if factory.kw.get("twophase"):
        raise ConfigurationError("session: a job's transaction ends by its own COMMIT: leave twophase out")
    if str(engine.get_execution_options().get("isolation_level", "")).upper() == "AUTOCOMMIT" or _autocommits(engine):
        raise ConfigurationError(AUTOCOMMIT)
    return engine


def connections_of(factory: SessionFactory, jobs: int) -> int:
    """Return how many connections its engine's pool opens at most; of a pool without bounds, one for each job at once."""
    pool = engine_of(factory).pool
    size: int = pool.size() if hasattr(pool, "size") else 0
    more: int = getattr(pool, "_max_overflow", 0)
    return size + more if size > 0 and more >= 0 else jobs


AUTOCOMMIT = (
    "session: the engine's isolation_level is AUTOCOMMIT, so that a job would have no transaction: give the factory an "
    "engine without it, such as engine.execution_options(isolation_level='READ COMMITTED')"
)


def _autocommits(engine: Any) -> bool:
    # What create_async_engine() was given: it becomes public on a connection only.
    level = getattr(engine.dialect, "_on_connect_isolation_level", None)
    own = engine.get_execution_options().get("isolation_level")
    return own is None and str(level or "").upper() == "AUTOCOMMIT"
