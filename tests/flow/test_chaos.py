"""The chaos run of benchmarks/, shortly; and that each of its sabotages still finds the text that it breaks."""

import pytest

from aioqueue.sql import functions
from benchmarks.chaos import run
from benchmarks.sabotage import SABOTAGES, Sabotage
from tests.postgres import Database

pytestmark = pytest.mark.anyio


async def test_the_books_balance_after_some_seconds_of_chaos(migrated: Database) -> None:
    chaos = await run(migrated.dsn("owner"), 4, 1, 4, 8, Sabotage("none"))
    assert chaos.faults == []
    assert len(chaos.committed) > 100
    assert chaos.counts["floor audits"] > 0


async def test_floors_that_wait_for_nobody_are_caught(migrated: Database) -> None:
    chaos = await run(migrated.dsn("owner"), 4, 1, 4, 8, SABOTAGES["floor-wait"])
    assert chaos.faults


@pytest.mark.parametrize("name", sorted(SABOTAGES))
def test_each_sabotage_finds_the_text_that_it_breaks(name: str) -> None:
    for function, changes in SABOTAGES[name].changes.items():
        text = functions()[function]
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
