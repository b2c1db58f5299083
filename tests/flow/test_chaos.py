"""The harness of benchmarks/chaos.py, shortly: both stages balance; each sabotage still finds what it breaks."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

from aioqueue.floor import LaneFloor
from aioqueue.sql import functions
from benchmarks.chaos_harness.command import ROUNDS, SABOTAGED_ENGINE
from benchmarks.chaos_harness.engine.run import run as run_engine
from benchmarks.chaos_harness.sabotage import PATCHES, SABOTAGES, Sabotage
from benchmarks.chaos_harness.storm.model import KINDS, Storm
from benchmarks.chaos_harness.storm.run import run as run_storm
from tests.postgres import Database

ROOT = Path(__file__).parents[2]


@pytest.mark.anyio
async def test_the_books_balance_after_some_seconds_of_the_engine_by_hand(migrated: Database) -> None:
    chaos = await run_engine(migrated.dsn("owner"), 4, 1, 4, 8)
    assert chaos.faults == []
    assert len(chaos.committed) > 100
    assert chaos.counts["floor audits"] > 0


@pytest.mark.anyio
async def test_an_enqueue_that_takes_its_xid_too_late_is_caught(migrated: Database) -> None:
    for seed in range(ROUNDS):
        if (await run_engine(migrated.dsn("owner"), SABOTAGED_ENGINE, seed, 4, 8, SABOTAGES["xid-first"])).faults:
            return
    pytest.fail("not caught")


def storm(directory: Path, *, kinds: set[str], seconds: float, sabotage: str | None = None) -> Storm:
    broken = None if sabotage is None else SABOTAGES[sabotage]
    return run_storm(directory, seconds=seconds, seed=1, kinds=frozenset(kinds), workers=3, interval=2.0, sabotage=broken)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_books_balance_after_kills_failovers_and_cut_commits(tmp_path: Path) -> None:
    found = storm(tmp_path, kinds={"kill", "terminate", "failover", "commit"}, seconds=20)
    assert found.faults == []
    assert found.counts["fault: kill"] > 0
    assert found.counts["connections cut at COMMIT"] > 0
    assert found.counts["fault: failover"] > 0
    assert len(found.committed) > 100


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_that_runs_for_another_tenant_is_caught(tmp_path: Path) -> None:
    assert storm(tmp_path, kinds=set(), seconds=3, sabotage="tenant").faults


@pytest.mark.parametrize("name", sorted(SABOTAGES))
def test_each_sabotage_finds_what_it_breaks(name: str) -> None:
    sabotage = SABOTAGES[name]
    for function, changes in sabotage.changes.items():
        text = functions()[function]
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
    assert sabotage.patch in PATCHES
    assert sabotage.kinds is None or sabotage.kinds <= set(KINDS)
    assert sabotage.changes or sabotage.patch or sabotage.floor is not Sabotage("nothing").floor
    assert inspect.signature(sabotage.floor.observe) == inspect.signature(LaneFloor.observe)


def test_the_command_runs_by_its_path_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "--sabotage" in done.stdout
