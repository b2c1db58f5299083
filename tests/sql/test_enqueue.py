"""enqueue: one job from SQL, by named arguments; what holds is in test_enqueue_many.py."""

import psycopg
import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_the_task_alone(boss: Session, guest: Session) -> None:
    job_id = await guest.value("SELECT aioqueue.enqueue('mail')")
    assert await boss.rows("SELECT id, task, payload, tenant, queue, priority, max_attempts, state FROM aioqueue.jobs") == [
        (job_id, "mail", {}, None, "default", 0, 5, "ready")
    ]


async def test_every_argument_by_name(boss: Session, guest: Session) -> None:
    job_id = await guest.value(
        "SELECT aioqueue.enqueue(task => 'mail', payload => '{\"to\": \"a\"}', tenant => 'T', queue => 'q', priority => 1,"
        " delay => '90 seconds', max_attempts => 2, id => '00000000-0000-7000-8000-000000000001')"
    )
    (row,) = await boss.rows(
        "SELECT id, task, payload, tenant, queue, priority, max_attempts, state, run_at - created_at FROM aioqueue.jobs"
    )
    assert row[:8] == (job_id, "mail", {"to": "a"}, "T", "q", 1, 2, "scheduled")
    assert row[8].total_seconds() == 90


@pytest.mark.parametrize("style", ["postgres", "postgres_verbose", "sql_standard", "iso_8601"])
async def test_the_sessions_styles_change_no_time(boss: Session, guest: Session, style: str) -> None:
    await guest.rows(f"SET intervalstyle = {style}")
    await guest.rows("SET datestyle = 'SQL, DMY'")
    await guest.rows("SET timezone = 'Asia/Kathmandu'")
    await guest.rows("SELECT aioqueue.enqueue('a', delay => '1 day 02:03:04.5'), aioqueue.enqueue('b', run_at => '2999-02-01Z')")
    times = await boss.rows("SELECT run_at - created_at, run_at = '2999-02-01Z' FROM aioqueue.jobs ORDER BY task")
    assert times[0][0].total_seconds() == 86_400 + 7_384.5
    assert times[1][1] is True


async def test_a_trigger_enqueues_with_its_own_transaction(boss: Session, guest: Session) -> None:
    await guest.rows("CREATE TEMP TABLE orders (id int)")
    await guest.rows(
        "CREATE FUNCTION pg_temp.announce() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM aioqueue.enqueue('announce', jsonb_build_object('order', new.id)); RETURN new; END $$"
    )
    await guest.rows("CREATE TRIGGER t AFTER INSERT ON orders FOR EACH ROW EXECUTE FUNCTION pg_temp.announce()")
    await guest.begin()
    await guest.rows("INSERT INTO orders VALUES (1)")
    await guest.rollback()
    await guest.rows("INSERT INTO orders VALUES (2)")
    assert await boss.rows("SELECT task, payload FROM aioqueue.jobs") == [("announce", {"order": 2})]


async def test_a_refusal_names_the_option(guest: Session) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="job 1 of 1: priority: expected -2 to 2, got 9"):
        await guest.rows("SELECT aioqueue.enqueue('a', priority => 9)")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="task: expected a name"):
        await guest.rows("SELECT aioqueue.enqueue(NULL)")


async def test_a_payload_of_null_is_jsons_null(boss: Session, guest: Session) -> None:
    await guest.rows("SELECT aioqueue.enqueue('a', 'null'), aioqueue.enqueue('b', NULL)")
    assert await boss.rows("SELECT payload::text FROM aioqueue.jobs") == [("null",), ("null",)]


async def test_a_key(one: Session, guest: Session) -> None:
    job_id = await guest.value("SELECT aioqueue.enqueue('t', key => 'printer 7')")
    assert await one.value("SELECT key FROM aioqueue.jobs WHERE id = %s", job_id) == "printer 7"
    for name in ("", " ", "x" * 201):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="key: expected a name"):
            await guest.value("SELECT aioqueue.enqueue('t', key => %s)", name)
