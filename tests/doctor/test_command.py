"""The command `doctor`: what it prints, as text and as JSON, its exit codes, and that its page names every code."""

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from aioqueue.cli.main import cli
from aioqueue.doctor import start
from aioqueue.doctor.examine import kinds
from aioqueue.sql import checks
from tests.doctor.conftest import Execute

pytestmark = pytest.mark.anyio
PAGE = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"


@pytest.fixture(autouse=True)
def nothing_else_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AIOQUEUE_", "PG")) or name == "DATABASE_URL":
            monkeypatch.delenv(name)


def doctor(dsn: str, schema: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["--dsn", dsn, "--schema", schema, "doctor", *arguments])


async def run(dsn: str, schema: str, *arguments: str) -> Result:
    return await asyncio.to_thread(doctor, dsn, schema, *arguments)


async def test_nothing_is_wrong(shop: Execute, worker_dsn: str, owner_dsn: str, schema: str) -> None:
    for dsn in (worker_dsn, owner_dsn):
        said = await run(dsn, schema)
        assert (said.exit_code, said.stdout.rstrip().endswith("nothing is wrong")) == (0, True)
        assert "connections: 0 workers need up to 0, others have" in said.stdout
        assert "a notification takes" in said.stdout
        found: dict[str, Any] = json.loads((await run(dsn, schema, "--json")).stdout)
        assert (found["wrong"], found["findings"], found["unseen"]) == (False, [], [])


async def test_a_finding_is_printed_with_its_fix_and_exits_with_3(shop: Execute, worker_dsn: str, schema: str) -> None:
    await shop("GRANT TRUNCATE ON shop.orders TO aioqueue_worker", "BEGIN", "INSERT INTO shop.colours VALUES ('red')")
    said = await run(worker_dsn, schema)
    assert said.exit_code == 3
    for part in (
        "error truncate-granted\n", "role aioqueue_worker may TRUNCATE table shop.orders", "    REVOKE TRUNCATE ON shop.orders",
        "advice horizon-held\n", "not seen: since when", "pg_read_all_stats",
    ):  # fmt: skip
        assert part in said.stdout
    assert "nothing is wrong" not in said.stdout
    again = await run(worker_dsn, schema, "--json")
    assert again.exit_code == 3
    found = json.loads(again.stdout)
    assert found["wrong"] is True
    assert found["findings"][0].keys() == {"code", "severity", "what", "why", "fix"}
    assert [finding["code"] for finding in found["findings"]] == ["truncate-granted", "horizon-held"]


async def test_advice_alone_is_exit_code_0(shop: Execute, worker_dsn: str, schema: str) -> None:
    await shop("BEGIN", "INSERT INTO shop.colours VALUES ('red')")
    said = await run(worker_dsn, schema)
    assert (said.exit_code, "advice horizon-held" in said.stdout, "nothing is wrong" in said.stdout) == (0, True, True)


async def test_the_app_names_the_setting(
    shop: Execute, worker_dsn: str, schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shop("CREATE POLICY theirs ON shop.colours USING (name = current_setting('app.customer'))")
    (tmp_path / "doctors_app.py").write_text(
        "from aioqueue import AioQueue, TenantSettings\n"
        f"app = AioQueue({worker_dsn!r}, schema={schema!r}, tenants=TenantSettings(setting='app.customer'))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = await asyncio.to_thread(CliRunner().invoke, cli, ["doctor", "-A", "doctors_app:app", "--json"])
    assert (said.exit_code, [f["code"] for f in json.loads(said.stdout)["findings"]]) == (3, ["rls-off"])


async def test_when_it_cannot_look(shop: Execute, client_dsn: str, worker_dsn: str, schema: str) -> None:
    said = await run(client_dsn, schema)
    assert (said.exit_code, "--grants ROLE" in said.stderr) == (1, True), "a client may not read the queue"
    assert (await run("postgresql://127.0.0.1:1/none", schema)).exit_code == 1
    assert (await run("nonsense", schema)).exit_code == 2
    said = await run(worker_dsn, "elsewhere", "--json")
    assert (said.exit_code, [f["code"] for f in json.loads(said.stdout)["findings"]]) == (3, ["schema-version"])


def test_the_page_names_exactly_the_codes() -> None:
    """Each with its severity."""
    found = dict(re.findall(r"^### `([a-z-]+)` \((\w+)", PAGE.read_text(), re.MULTILINE))
    known = {code: str(kind.severity) for code, kind in {**kinds(), start.UNCHECKED.code: start.UNCHECKED}.items()}
    assert found == known


def test_every_file_is_a_checks_and_says_what_it_reads() -> None:
    modules = {path.stem for path in (Path(start.__file__).parent).glob("*.py")}
    for name, text in checks().items():
        assert text.startswith(f"-- {name}: "), name
        assert "Changes nothing." in text, name
        assert name in modules | {"worker_roles", "tenant_policies", "related_tables"}, name
