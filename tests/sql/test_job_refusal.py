"""job_refusal: the first option that is not allowed is named with what was expected."""

from typing import Any

import pytest

from tests.sql.engine import Session

pytestmark = pytest.mark.anyio

GOOD: dict[str, Any] = {
    "task": "t", "queue": "q", "tenant": None, "key": None, "priority": 0, "max_attempts": 5, "due": None,
}  # fmt: skip


async def refusal(boss: Session, **options: object) -> str | None:
    ((reason,),) = await boss.rows(
        "SELECT aioqueue.job_refusal(%s::text, %s::text, %s::text, %s::text, %s::integer, %s::integer, %s::timestamptz)",
        *{**GOOD, **options}.values(),
    )
    found: str | None = reason
    return found


async def test_what_is_allowed(boss: Session) -> None:
    assert await refusal(boss) is None
    assert await refusal(boss, tenant="T", key="k", priority=-2, max_attempts=10_000, due="9999-12-29Z") is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("task", None), ("task", " "), ("task", "t" * 201), ("queue", ""), ("queue", "q" * 201), ("tenant", " "), ("key", ""),
        ("key", "k" * 201), ("priority", 3), ("priority", -3), ("max_attempts", 0), ("max_attempts", 10_001),
        ("due", "infinity"), ("due", "4000-01-01 BC"),
    ],
)  # fmt: skip
async def test_what_is_not(boss: Session, option: str, value: object) -> None:
    reason = await refusal(boss, **{option: value})
    assert reason is not None
    assert reason.startswith("run_at, delay: expected" if option == "due" else f"{option}: expected")
