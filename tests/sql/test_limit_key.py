"""limit_key: stable for ever, and another for every limit."""

import pytest

from tests.sql.engine import Session, limit_key

pytestmark = pytest.mark.anyio
NAMES: list[tuple[str, str, str | None]] = [
    ("tenant", "a", None), ("task", "a", None), ("key", "a", None), ("key", "a", ""), ("key", "a", "b"), ("key", "a:b", None),
    ("key", "a:b", "c"), ("key", "a", "b:c"), ("task", "1:a", None), ("tenant", "", None), ("tenant", "käse", "ß"),
]  # fmt: skip


async def test_the_same_as_ever(boss: Session) -> None:
    """As the tests compute it, and as it was in the first version."""
    for name in NAMES:
        assert await boss.value("SELECT aioqueue.limit_key(%s, %s, %s)", *name) == limit_key(*name), name
    assert limit_key("tenant", "42") == 4815100797869751843


def test_no_two_limits_share_one() -> None:
    assert len({limit_key(*name) for name in NAMES}) == len(NAMES)
