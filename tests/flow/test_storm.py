"""The storm of benchmarks/, shortly: workers are killed and their connections ended; then the books must balance."""

import asyncio
from pathlib import Path

import pytest

from aioqueue.sql import functions
from benchmarks.storm import run
from benchmarks.storm_run import Storm
from benchmarks.storm_sabotage import SABOTAGES
from benchmarks.storm_server import storm_server


def storm(directory: Path, *, kinds: set[str], seconds: float, sabotage: str | None = None) -> Storm:
    with storm_server() as server:
        broken = None if sabotage is None else SABOTAGES[sabotage]
        return asyncio.run(run(server, directory, seconds=seconds, seed=1, kinds=frozenset(kinds), workers=3, sabotage=broken))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_books_balance_after_kills_and_ended_connections(tmp_path: Path) -> None:
    found = storm(tmp_path, kinds={"kill", "terminate"}, seconds=20)
    assert found.faults == []
    assert found.counts["fault: kill"] > 0
    assert found.counts["backends terminated"] > 0
    assert len(found.committed) > 100
    assert not [what for what in found.counts if what.startswith("two runs at once")]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_runs_for_another_tenant_is_caught(tmp_path: Path) -> None:
    assert storm(tmp_path, kinds=set(), seconds=3, sabotage="tenant").faults


@pytest.mark.parametrize("name", sorted(SABOTAGES))
def test_each_sabotage_finds_the_text_that_it_breaks(name: str) -> None:
    for function, changes in SABOTAGES[name].changes.items():
        for old, _ in changes:
            assert old in functions()[function]
