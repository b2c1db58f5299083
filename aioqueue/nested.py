"""Tenants within a job's transaction: `async with tx.tenant("43"):` is a savepoint under another identity.

Whatever is in force when a block begins or ends is checked first: no block may hide that user code changed it by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from .context import JobTransaction
from .errors import InvalidOption, TransactionViolation
from .identity import MARKER, Identity
from .job import Claimed
from .options import check_tenant
from .settings import TenantSettings
from .store import Store


class Nesting:
    """The identities that one transaction has at this moment, the job's own first."""

    face: JobTransaction
    """The transaction as user code has it."""

    def __init__(self, store: Store, tenants: TenantSettings, job: Claimed, own: Identity, *, role: str, marker: str) -> None:
        self._store = store
        self._tenants = tenants
        self._job = job
        self._stack = [own]
        self._names: list[str | None] = [job.tenant]
        self._role = role
        self._marker = marker
        self.broken: TransactionViolation | None = None
        """What user code was found to have changed: whatever it does about that error, the transaction must not commit."""

    @contextlib.asynccontextmanager
    async def open(self, tenant: str) -> AsyncIterator[None]:
        """See `JobTransaction.tenant`."""
        if check_tenant(tenant) is None:
            raise InvalidOption("tenant", "expected a tenant's name, got None")
        inner = Identity.of_tenant(self._job, self._tenants, tenant)
        async with self.face.connection.transaction():
            outer = self._stack[-1]
            await self._switch(outer, inner)
            self._stack.append(inner)
            self._names.append(tenant)
            self.face.set_tenant(tenant)
            try:
                yield
                if self._stack[-1] is not inner:
                    raise self._broke("the blocks of tx.tenant() were not left in the order in which they were entered")
                # On an error the savepoint brings back what was before.
                await self._switch(inner, outer)
            finally:
                level = self._stack.index(inner)
                del self._stack[level], self._names[level]
                self.face.set_tenant(self._names[-1])

    async def _switch(self, now: Identity, then: Identity) -> None:
        """Set the settings and the role of `then`, if those of `now` are still in force."""
        conn = self.face.connection
        expected = {**now.settings, "role": now.role or self._role, MARKER: self._marker}
        wanted = {**dict.fromkeys(now.settings, ""), **then.settings}
        found = dict(zip(expected, await self._store.switch_local(conn, list(expected), wanted), strict=True))
        changed = [name for name in expected if found[name] != expected[name]]
        if MARKER in changed:
            raise self._broke("it ended the transaction that was opened for it (COMMIT or ROLLBACK in SQL)")
        if changed:
            raise self._broke(f"around a block of tx.tenant() it changed {changed[0]}, which policies go by")
        if now.role != then.role:
            await self._store.set_role(conn, then.role or self._role)

    def _broke(self, what: str) -> TransactionViolation:
        self.broken = TransactionViolation(f"the task broke its transaction: {what}")
        return self.broken
