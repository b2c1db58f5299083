"""Job: identities, lanes, and the handle that passes its questions on."""

import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioqueue.job import PRIORITIES, Job, JobState, JobStatus, lane, new_job_id
from aioqueue.states import JobEvent

pytestmark = pytest.mark.anyio


def milliseconds(job_id: UUID) -> int:
    return job_id.int >> 80


class TestNewJobId:
    def test_is_a_version_7_uuid_of_the_rfc_variant(self) -> None:
        for _ in range(2000):
            job_id = new_job_id()
            assert (job_id.version, job_id.int >> 62 & 0b11) == (7, 0b10)

    def test_carries_the_time(self) -> None:
        before = time.time_ns() // 1_000_000
        job_id = new_job_id()
        assert before <= milliseconds(job_id) <= time.time_ns() // 1_000_000

    @given(st.lists(st.integers(min_value=0, max_value=(1 << 48) - 1), min_size=2, max_size=20))
    def test_orders_by_millisecond(self, times: list[int]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            made = []
            for at in times:
                patch.setattr("aioqueue.job.time.time_ns", lambda at=at: at * 1_000_000 + 999_999)
                made.append(new_job_id())
        assert [milliseconds(job_id) for job_id in made] == times
        assert [milliseconds(job_id) for job_id in sorted(made)] == sorted(times)
        assert [milliseconds(UUID(text)) for text in sorted(map(str, made))] == sorted(times)

    def test_the_rest_is_random(self) -> None:
        made = [new_job_id().int for _ in range(2000)]
        assert len(set(made)) == 2000
        random_bits = ((1 << 80) - 1) & ~(0xF << 76) & ~(0b11 << 62)
        always, ever = random_bits, 0
        for value in made:
            always &= value
            ever |= value
        assert always == 0
        assert ever & random_bits == random_bits


class TestLane:
    # Stored in every database: these values may never change.
    @pytest.mark.parametrize(
        ("queue", "priority", "value"),
        [
            ("default", 0, -515_155_160_543_296_198),
            ("default", 2, 6_218_344_275_987_400_201),
            ("default", -2, -7_351_644_138_455_489_399),
            ("größe 📬", 1, -5_055_701_389_717_351_035),
        ],
    )
    def test_known_values(self, queue: str, priority: int, value: int) -> None:
        assert lane(queue, priority) == value

    @given(
        queue=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        priority=st.sampled_from(PRIORITIES),
    )
    def test_is_a_signed_64_bit_number(self, queue: str, priority: int) -> None:
        assert -(1 << 63) <= lane(queue, priority) < 1 << 63

    def test_priorities_and_queues_have_lanes_of_their_own(self) -> None:
        lanes = {lane(queue, priority) for queue in ("a", "b", "1:a", "-1:a") for priority in PRIORITIES}
        assert len(lanes) == 4 * len(PRIORITIES)


def test_states_that_are_final() -> None:
    assert {state for state in JobState if state.ended} == {"succeeded", "dead", "cancelled"}


class Source:
    """Answers a handle's questions with what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    async def wait_result(self, job: Job[Any], timeout: float | None) -> Any:
        self.asked.append(("result", job, timeout))
        return "the result"

    async def job_status(self, job: Job[Any]) -> JobStatus:
        raise LookupError("status")

    async def cancel_job(self, job: Job[Any], *, on: object | None) -> JobState:
        self.asked.append(("cancel", job))
        return JobState.CANCELLED

    async def retry_job(self, job: Job[Any], *, on: object | None) -> Job[Any]:
        self.asked.append(("retry", job, on))
        return job

    def watch_job(self, job: Job[Any], timeout: float | None) -> AsyncIterator[JobEvent[Any]]:
        raise NotImplementedError


class TestJob:
    async def test_result_takes_seconds_a_timedelta_or_nothing(self) -> None:
        source = Source()
        job: Job[str] = Job(new_job_id(), source=source)
        for timeout in (None, 1.5, timedelta(minutes=1)):
            assert await job.result(timeout) == "the result"
        assert source.asked == [("result", job, None), ("result", job, 1.5), ("result", job, 60.0)]

    async def test_status_cancel_and_retry_are_passed_on(self) -> None:
        source = Source()
        job: Job[str] = Job(new_job_id(), source=source, tenant="42")
        assert await job.cancel() is JobState.CANCELLED
        on = object()
        assert await job.retry(on=on) is job
        assert source.asked == [("cancel", job), ("retry", job, on)]
        with pytest.raises(LookupError, match="status"):
            await job.status()

    def test_shows_its_id(self) -> None:
        job_id = new_job_id()
        assert repr(Job(job_id, source=Source())) == f"Job('{job_id}')"
