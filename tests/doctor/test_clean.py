"""A database in which nothing is wrong: no finding, whoever looks; and what is shown all the same."""

from typing import Any

import pytest

from aioqueue.doctor.examination import Examination
from tests.doctor.conftest import Examine, Execute, Start, codes

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("role", ["worker", "owner", "superuser"])
async def test_nothing_is_found(look: Examine, role: str) -> None:
    report = await look(role)
    assert report.findings == ()
    assert not report.wrong
    assert report.unseen == ()
    assert report.facts["connections"]["limits"].keys() == {"the server"}
    assert report.facts["notify_seconds"] > 0


async def test_nothing_is_found_at_a_start(start: Start) -> None:
    assert await start() == []
    assert await start(strict=True) == []


async def test_the_number_of_statements_does_not_depend_on_that_of_tables(
    look: Examine, shop: Execute, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sixty tenant tables with a partition each, all of them open, are asked for at once."""
    asked: list[str] = []
    ask = Examination.rows

    async def rows(self: Examination, name: str, **params: object) -> list[dict[str, Any]]:
        asked.append(name)
        return await ask(self, name, **params)

    monkeypatch.setattr(Examination, "rows", rows)
    await look()
    few = list(asked)
    await shop(
        *(
            f"CREATE TABLE shop.t{n} (t text) PARTITION BY LIST (t); CREATE TABLE shop.t{n}_a PARTITION OF shop.t{n} DEFAULT;"
            f" CREATE POLICY own ON shop.t{n} USING (t = current_setting('app.tenant', true));"
            f" GRANT SELECT ON shop.t{n}, shop.t{n}_a TO aioqueue_worker; CREATE VIEW shop.v{n} AS SELECT * FROM shop.t{n};"
            for n in range(60)
        )
    )
    asked.clear()
    assert set(codes(await look())) == {"rls-off", "partition-without-policy"}
    assert asked == few
    assert len(few) == len(set(few)) <= 20


async def test_tables_and_settings_that_have_nothing_to_do_with_tenants(look: Examine, shop: Execute) -> None:
    """No policy at all, another setting's policies, a view of no tenant table, a restrictive policy."""
    await shop(
        "CREATE TABLE shop.other (kind text)",
        "ALTER TABLE shop.other ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY all_of_it ON shop.other USING (kind = current_setting('app.tenant_kind', true))",
        "GRANT SELECT, TRUNCATE ON shop.other TO aioqueue_worker",
        "CREATE VIEW shop.names AS SELECT name FROM shop.colours",
        "GRANT SELECT ON shop.names TO aioqueue_worker",
        "CREATE POLICY positive ON shop.orders AS RESTRICTIVE USING (id > 0)",
        "CREATE POLICY nothing ON shop.orders USING (false)",
        "CREATE POLICY theirs ON shop.orders TO aioqueue_client USING (true)",
    )
    assert (await look()).findings == ()
