"""For tasks that work with SQLAlchemy 2: `JobSession`, an AsyncSession inside its job's transaction (docs/transactions.md)."""

from __future__ import annotations

try:
    from aioqueue.session import JobSession
except ImportError as error:
    raise ImportError(
        f"aioqueue.contrib.sqlalchemy needs SQLAlchemy 2: pip install 'aioqueue-pg[sqlalchemy]' ({error})", name=error.name
    ) from error

__all__ = ["JobSession"]
