"""The demo, as a user starts it: at a twentieth of its size here, in full in .ci/run."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from aioqueue import embedded
from aioqueue.cli import demo as command
from aioqueue.demo import data
from aioqueue.demo.report import Check, Report, TenantRow
from aioqueue.demo.screen import Screen, show_report
from tests.kit import wait_until_true

TWENTIETH = data.LARGEST // 20


@pytest.fixture(scope="module")
def server() -> Iterator[embedded.EmbeddedServer]:
    """An embedded server, kept by us while demos come and go; as root, another user must reach it."""
    home = Path(tempfile.mkdtemp(prefix="aioqueue-test-", dir="/tmp")).resolve()
    home.chmod(0o755)
    with embedded.start(home / "data") as running:
        yield running
    wait_until_true(lambda: not (home / "data" / "pgdata" / "postmaster.pid").exists())
    shutil.rmtree(home, ignore_errors=True)


def arguments(server: embedded.EmbeddedServer, *more: str) -> list[str]:
    return [sys.executable, "-m", "aioqueue", "demo", "--data-dir", str(server.data_dir), "--invoices", str(TWENTIETH), *more]


def value(server: embedded.EmbeddedServer, query: str) -> Any:
    with psycopg.connect(server.dsn("superuser"), autocommit=True) as conn:
        row = conn.execute(query.encode()).fetchone()
    return None if row is None else row[0]


def test_every_figure_is_right_and_the_tables_are_gone(server: embedded.EmbeddedServer) -> None:
    # Variables of the caller's own project must not lead it elsewhere.
    environment = {**os.environ, "AIOQUEUE_DSN": "postgresql://nowhere.invalid/none", "AIOQUEUE_SCHEMA": "none"}
    done = subprocess.run(arguments(server, "--json"), capture_output=True, text=True, check=False, env=environment, cwd="/")
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert len(report["checks"]) > 20
    assert all(check["ok"] for check in report["checks"])
    computed = {row["tenant"]: row["computed"] for row in report["tenants"]}
    assert computed == {tenant: TWENTIETH // tenant for tenant in range(1, 101)}
    assert {row["runs"] for row in report["tenants"]} == {1}
    kept = [(row["job"], row["attempt"], row["reason"]) for row in report["attempts"]]
    assert kept == [
        *(("divide", attempt, "error") for attempt in (1, 2, 3)),
        *(("poison", attempt, "worker lost") for attempt in (1, 2, 3)),
    ]
    assert value(server, "SELECT to_regnamespace('demo')") is None


def test_tables_are_kept_when_asked_and_what_another_demo_left_is_not(server: embedded.EmbeddedServer) -> None:
    with psycopg.connect(server.dsn("owner")) as conn:
        conn.execute("CREATE SCHEMA IF NOT EXISTS demo")
        conn.execute("CREATE TABLE demo.left_over ()")
    done = subprocess.run(arguments(server, "--keep"), capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "all 100 equal" in done.stdout
    assert "WRONG" not in done.stdout
    assert value(server, "SELECT count(*) FROM demo.invoices") == sum(TWENTIETH // tenant for tenant in range(1, 101))
    assert value(server, "SELECT to_regclass('demo.left_over')") is None


def test_a_demo_that_is_stopped_leaves_no_worker(server: embedded.EmbeddedServer) -> None:
    with subprocess.Popen(arguments(server), stdout=subprocess.PIPE, text=True, cwd="/") as process:
        assert process.stdout is not None
        while not (line := process.stdout.readline()).startswith("5. "):
            assert line, "the demo ended before its fifth step"
        assert value(server, "SELECT count(*) FROM pg_stat_activity WHERE usename = 'aioqueue_worker'") > 0
        process.terminate()
        process.stdout.read()
    assert process.returncode == 1
    wait_until_true(lambda: value(server, "SELECT count(*) FROM pg_stat_activity WHERE usename = 'aioqueue_worker'") == 0)


def test_two_demos_in_one_directory_are_one_too_many(server: embedded.EmbeddedServer) -> None:
    with psycopg.connect(server.dsn("superuser"), autocommit=True) as conn:
        conn.execute("SELECT pg_advisory_lock(hashtextextended('aioqueue demo', 0))")
        done = subprocess.run(arguments(server), capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 1
    assert "another demo runs" in done.stderr


def report(*, computed: int) -> Report:
    row = TenantRow(1, 20_000, computed, True, 1, 1, 1, 1.0, 1.0)
    return Report(tenants=[row], checks=[Check("invoices", 20_000, computed, row.ok)], data_dir="/nowhere")


@pytest.mark.parametrize(("computed", "code"), [(20_000, 0), (19_999, 1)])
def test_a_wrong_figure_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, computed: int, code: int) -> None:
    class Done:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        async def run(self) -> Report:
            return report(computed=computed)

    monkeypatch.setattr(command, "Demo", Done)
    result = CliRunner().invoke(command.demo)
    assert result.exit_code == code
    assert ("WRONG" in result.output) is bool(code)


def test_no_checks_are_not_all_right() -> None:
    assert not Report().ok


def test_the_table_names_a_wrong_tenant(capsys: pytest.CaptureFixture[str]) -> None:
    show_report(Screen(), report(computed=19_999))
    shown = capsys.readouterr().out
    assert "1 WRONG" in shown
    assert "1 of 1 checks WRONG" in shown


def test_the_figures_are_those_of_the_experiment() -> None:
    figures = [data.expected(tenant) for tenant in range(1, data.TENANTS + 1)]
    assert [figure.invoices for figure in figures[:3]] == [20_000, 10_000, 6_666]
    assert sum(figure.invoices for figure in figures) == 103_707
