"""For tasks that work with SQLAlchemy 2: `JobSession`, an AsyncSession inside its job's transaction (docs/transactions.md)."""

from __future__ import annotations

from aioqueue.session import JobSession

__all__ = ["JobSession"]
