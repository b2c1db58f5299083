"""Tenants within a job's transaction: `async with tx.tenant("43"):` is a savepoint under another identity.

Whatever is in force when a block begins or ends is checked first: no block may hide that user code changed it by itself. A block
is its task's, and that of the tasks started in it: no other task of the job sends anything meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from psycopg import AsyncConnection

from .claimed import Claimed
from .context import CurrentTenant
from .errors import InvalidOption, TransactionViolation
from .identity import MARKER, Identity
from .job_connection import LEFT
from .options import check_tenant
from .settings import TenantSettings
from .store import Store


class Savepoints(Protocol):
    """What blocks are made of, on one library's connection."""

    def savepoint(self) -> contextlib.AbstractAsyncContextManager[object]:
        """Open a savepoint, released at the end of the block, rolled back by an exception."""
        ...

    async def switch_local(self, names: Sequence[str], values: Mapping[str, str]) -> Sequence[str | None]:
        """Read settings, then set others for the transaction; see Store.switch_local."""
        ...

    async def set_role(self, role: str) -> None:
        """Take a role for the rest of the transaction."""
        ...


class OnConnection:
    """Savepoints of psycopg."""

    def __init__(self, store: Store, conn: AsyncConnection[Any]) -> None:
        self._store = store
        self._conn = conn

    def savepoint(self) -> contextlib.AbstractAsyncContextManager[object]:
        """See Savepoints."""
        return self._conn.transaction()

    async def switch_local(self, names: Sequence[str], values: Mapping[str, str]) -> Sequence[str | None]:
        """See Savepoints."""
        return await self._store.switch_local(self._conn, names, values)

    async def set_role(self, role: str) -> None:
        """See Savepoints."""
        await self._store.set_role(self._conn, role)


@dataclass(slots=True, eq=False)
class _Block:
    """One block of one transaction, or the whole of it."""

    of: object
    """Names the transaction. No block knows it: what refers to itself, job by job, is for the garbage collector to find."""
    identity: Identity
    tenant: str | None


_current: ContextVar[_Block | None] = ContextVar("aioqueue_block", default=None)
"""The block that the current task is in, of whatever transaction."""


class Nesting:
    """The identities that one transaction has at this moment, the job's own first."""

    on: Savepoints
    """The connection as user code has it."""

    def __init__(self, tenants: TenantSettings, job: Claimed, own: Identity, *, role: str, marker: str) -> None:
        self._tenants = tenants
        self._job = job
        self._name = object()
        self._whole = _Block(self._name, own, job.tenant)
        self._stack = [self._whole]
        self._role = role
        self._marker = marker
        self.broken: TransactionViolation | None = None
        """What user code was found to have changed: whatever it does about that error, the transaction must not commit."""

    @property
    def tenant(self) -> CurrentTenant:
        """The tenant of the block that the current task is in."""
        return CurrentTenant.of(self._here().tenant, self.open)

    def check(self) -> None:
        """Raise TransactionViolation where the current task is not in the innermost block: a statement would be another's."""
        if self._here() is not self._stack[-1]:
            raise self._broke(
                "a task used it outside of the innermost block of tx.tenant(), which another task is in, or after a block that "
                "it was started in: it would have worked for that block's tenant; let one task after the other use it"
            )

    @contextlib.asynccontextmanager
    async def open(self, tenant: str) -> AsyncIterator[None]:
        """See `JobTransaction.tenant`."""
        name = check_tenant(tenant)
        if name is None:
            raise InvalidOption("tenant", "expected a tenant's name, got none")
        self.check()
        before, outer = _current.get(), self._stack[-1]
        inner = _Block(self._name, Identity.of_tenant(self._job, self._tenants, name), name)
        # From here on, and until the other identity is in force again, nobody else's statement is sent.
        self._stack.append(inner)
        _current.set(inner)
        try:
            async with self.on.savepoint():
                await self._switch(outer.identity, inner.identity)
                yield
                if self._stack[-1] is not inner:
                    raise self._broke("the blocks of tx.tenant() were not left in the order in which they were entered")
                # On an error the savepoint brings back what was before.
                await self._switch(inner.identity, outer.identity)
        finally:
            self._stack.remove(inner)
            _current.set(before)

    def _here(self) -> _Block:
        block = _current.get()
        return block if block is not None and block.of is self._name else self._whole

    async def _switch(self, now: Identity, then: Identity) -> None:
        """Set the settings and the role of `then`, if those of `now` are still in force."""
        expected = {**now.settings, "role": now.role or self._role, MARKER: self._marker}
        wanted = {**dict.fromkeys(now.settings, ""), **then.settings}
        found = dict(zip(expected, await self.on.switch_local(list(expected), wanted), strict=True))
        changed = [name for name in expected if found[name] != expected[name]]
        if MARKER in changed:
            raise self._broke(LEFT)
        if changed:
            raise self._broke(f"around a block of tx.tenant() it changed {changed[0]}, which policies go by")
        if now.role != then.role:
            await self.on.set_role(then.role or self._role)

    def _broke(self, what: str) -> TransactionViolation:
        self.broken = TransactionViolation.by(what)
        return self.broken
