"""uuidv7: ids for clients that bring none."""

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio


async def test_version_variant_time_and_chance(boss: Session) -> None:
    before = await boss.value("SELECT floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint")
    ids = [row[0] for row in await boss.rows("SELECT aioqueue.uuidv7() FROM generate_series(1, 2000)")]
    after = await boss.value("SELECT ceil(extract(epoch FROM clock_timestamp()) * 1000)::bigint")
    assert {(job_id.version, job_id.variant) for job_id in ids} == {(7, "specified in RFC 4122")}
    assert len({job_id.int & (1 << 62) - 1 for job_id in ids}) == len(ids)
    assert len({job_id.int >> 64 & 0xFFF for job_id in ids}) > 1_000
    assert all(before <= job_id.int >> 80 <= after for job_id in ids)
    assert [job_id.int >> 80 for job_id in ids] == sorted(job_id.int >> 80 for job_id in ids)
