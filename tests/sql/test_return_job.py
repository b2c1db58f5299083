"""return_job: what becomes of one job that did not succeed; its callers are tested in test_record.py and test_rescue.py."""

from typing import Any

import pytest

from tests.sql.engine import Session, entry

pytestmark = pytest.mark.anyio
CALL = "SELECT aioqueue.return_job(l, %s::bigint, 'error', 'E', 'm', 'tb', %s::float, %s::boolean, NULL) FROM aioqueue.live l"


@pytest.mark.parametrize(
    ("delay", "state", "place"), [(None, "dead", "outcome"), (0, "ready", "live"), (3, "scheduled", "scheduled")]
)
@pytest.mark.parametrize("spare", [False, True])
async def test_one_job_one_place_one_attempts_row(
    boss: Session, one: Session, delay: float | None, state: str, place: str, spare: bool
) -> None:
    job_id = await one.enqueue_one(tenant="T")
    job = await one.claim_one(await one.register())
    await boss.publish(job.vt)
    assert await boss.value(CALL, 77, delay, spare) == state
    assert await boss.places(job_id) == [place]
    assert await boss.attempts(job_id) == [(1, "error", "m")]
    if place != "outcome":
        facts = f"SELECT lane, tenant, attempt, spared FROM aioqueue.{place}"
        assert await boss.rows(facts) == [(77, "T", 1, int(spare))], "in the lane it was told"


async def test_a_negative_delay_is_ready(boss: Session, one: Session) -> None:
    await one.enqueue()
    await one.claim_one(await one.register())
    assert await boss.value(CALL, 77, -5, False) == "ready"


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        ({"reason": "succeeded"}, "succeeded"),
        ({"reason": "error", "d": 0}, "ready"),
        ({"reason": "error", "d": 60}, "scheduled"),
        ({"reason": "error", "d": None}, "dead"),
        ({"reason": "cancelled", "d": None}, "cancelled"),
        ({"reason": "interrupted", "d": 0, "s": True}, "ready"),
    ],
)
async def test_whatever_becomes_of_a_job_it_lets_go_of_its_keys(one: Session, outcome: dict[str, Any], state: str) -> None:
    """And so does one that was asked to cancel; the job beside it keeps its own."""
    key = await one.limit("T", 2)
    await one.enqueue(2, tenant="T")
    worker = await one.register()
    job, other = sorted(await one.claim(worker), key=lambda job: job.vt)
    assert await one.record(worker, entry(job, **outcome)) == {job.job_id: state}
    assert await one.held() == [(key, other.job_id)]
    await one.cancel(other.job_id)
    assert await one.record(worker, entry(other, "error", d=0)) == {other.job_id: "cancelled"}
    assert await one.held() == []
