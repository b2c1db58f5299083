"""The benchmarks run, and say what they found: at a small size, on the tests' server; figures are not judged here."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks import (
    footprint,
    held_drain,
    held_horizon,
    kit,
    mixed_workload,
    open_enqueues,
    scaling,
    throughput,
    transactions,
)
from tests.postgres import Database

Main = Callable[[Sequence[str] | None], int]


@pytest.mark.parametrize(
    ("main", "options", "said"),
    [
        (throughput.main, "--jobs 100 --rounds 1 --singles 5 --pickups 2 --idle 0.5", ["aioqueue", "drain/s"]),
        (transactions.main, "--jobs 20 --rounds 1 --connections 2", ["by hand", "aioqueue"]),
        (held_horizon.main, "--jobs 5050 --samples 5 --hold xid", ["free", "xid", "bytes of live", "last block to first"]),
        (held_drain.main, "--jobs 200 --rounds 1", ["aioqueue", "last tenth"]),
        (open_enqueues.main, "--open 0,5 --pickups 2", ["left open", "after the commit"]),
        pytest.param(
            footprint.main, "--running 50 --seconds 3", ["idle", "50 sleeping", "between beats"], marks=pytest.mark.slow
        ),
        pytest.param(mixed_workload.main, "--minutes 0.05 --rate 50", ["jobs that wait"], marks=pytest.mark.slow),
        pytest.param(
            scaling.main,
            "--jobs 100 --waiting 100 --processes 2 --rows 100 --rounds 1 --tenants 100 --samples 2",
            ["processes", "finished", "parked"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "throughput",
        "transactions",
        "held_horizon",
        "held_drain",
        "open_enqueues",
        "footprint",
        "mixed_workload",
        "scaling",
    ],
)
def test_a_benchmark_prints_its_table_and_draws_its_picture(
    main: Main, options: str, said: list[str], database: Database, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "picture.svg"
    assert main(["--dsn", database.server.dsn("superuser", "postgres"), "--svg", str(picture), *options.split()]) in (0, 1)
    printed = capfd.readouterr().out
    assert all(word in printed for word in said) and "| --- |" in printed
    assert picture.read_text().startswith("<svg")


def test_figures() -> None:
    assert kit.percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0 and kit.percentile([1.0], 0.99) == 1.0
    assert kit.rotated(["a", "b", "c"], 4) == ["b", "c", "a"]
    assert kit.table(["x"], [[1]]) == "| x |\n| --- |\n| 1 |"
