"""What a task with a first parameter `JobSession` is given: SQLAlchemy's AsyncSession, inside its job's transaction.

The faces only: what would end the transaction is refused where it is called, before it does anything. session_transaction.py
opens and ends it. To be imported from aioqueue.contrib.sqlalchemy.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn
from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession

from .claimed import Held_co
from .context import HeldSession
from .session_guard import Refusing, refuse
from .session_transaction import OpenSession


# Both checkers take SQLAlchemy's __weakref__ for a slot of its own.
class JobSession(Refusing, AsyncSession, HeldSession[Held_co]):  # type: ignore[misc]  # pyright: ignore[reportGeneralTypeIssues]
    """An AsyncSession in the transaction of its job, made as `AioQueue(session=)` says, with the job's tenant set locally.

    When the task returns, what is pending is flushed, the job is recorded as succeeded, and the session commits: all or nothing.
    commit(), rollback(), close() and begin() are refused; what may fail goes into `async with session.begin_nested():`. One task
    at a time uses it, and none after the job. `JobSession[Resources]` gives `session.resources` its type; a subclass of it and of
    your own session's class may stand in the annotation. `session.tenant` is the tenant's name and, called, another one's block.
    """

    opener: ClassVar[type[OpenSession]] = OpenSession

    async def reset(self) -> None:
        """Refused as `close` is."""
        refuse("reset()")

    def detach(self) -> None:
        """Take the transaction away; for the runtime, at its end."""
        ended: Any = _Ended(self.job_id)
        self.sync_session = self._proxied = ended


class _Ended:
    """Stands where the session was."""

    def __init__(self, job_id: UUID) -> None:
        self._job_id = job_id

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"the session of job {self._job_id} has ended with its transaction: do all work on it before the task ends, and "
            "take another of your own factory for what comes later"
        )
