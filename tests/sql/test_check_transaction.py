"""check_transaction: each way a task can break its transaction has a message of its own; see also test_finish.py."""

import psycopg
import pytest

from tests.sql.conftest import Connect
from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("COMMIT; BEGIN", "it ended the transaction that was opened for it"),
        ("RESET ALL", ".*or took back its settings"),
        ("SELECT set_config('app.tenant', 'U', true)", "it changed the setting app.tenant, which policies go by"),
        ("SET LOCAL ROLE aioqueue_worker", "it changed the role"),
        ("SET SESSION AUTHORIZATION aioqueue_worker", "it changed the session's user"),
        ("COMMIT; SET SESSION AUTHORIZATION aioqueue_worker; BEGIN", "it ended the transaction"),
        ("SELECT set_config('app.tenant', 'U', true); SET LOCAL row_security = off", "it switched row_security off"),
        ("SET LOCAL row_security = off", "it switched row_security off"),
    ],
)
async def test_what_the_task_did_is_said(connect: Connect, act: str, message: str) -> None:
    root = await connect("superuser")
    await root.enqueue(tenant="T")
    job = await root.claim_one(await root.register())
    await root.open_job(job)
    await root.confirm(job)
    await root.rows(act)
    with pytest.raises(psycopg.DatabaseError, match=f"the task broke its transaction: {message}"):
        await root.confirm(job)
    await root.rollback()


async def test_what_a_task_sets_and_sets_back_is_no_breach(one: Session) -> None:
    await one.enqueue(tenant="T")
    job = await one.claim_one(await one.register())
    await one.open_job(job)
    await one.rows("SAVEPOINT s; SELECT set_config('app.tenant', 'U', true); ROLLBACK TO s")
    await one.confirm(job)
    await one.commit()
