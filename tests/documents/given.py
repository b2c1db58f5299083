"""What the fragments of a page are given beside the README's tasks, and what is tried when all of them have run.

A page whose fragments are whole in themselves has nothing here.
"""

from collections.abc import Awaitable, Callable
from datetime import date

import httpx
import psycopg
from fastapi import FastAPI
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tests.documents.runner import PATIENCE, PageRun

Step = Callable[[PageRun], Awaitable[None]]

MADE = ("my_worker", "my_web", "my_owner", "app_jobs")
"""Roles that the pages take as made already, or make; none is left after a page."""
ROLES = """
    CREATE ROLE my_worker LOGIN;
    CREATE ROLE my_web LOGIN;
    CREATE ROLE app_jobs;
    GRANT app_jobs TO aioqueue_worker;
"""
TABLES = """
    CREATE SCHEMA shop AUTHORIZATION aioqueue_owner;
    GRANT USAGE ON SCHEMA shop TO PUBLIC;
    ALTER DEFAULT PRIVILEGES FOR ROLE aioqueue_owner IN SCHEMA shop GRANT SELECT, INSERT, UPDATE, DELETE ON TABLES TO PUBLIC;
"""
"""Where the tables of the pages are; it is the database's search path."""

SQL = {
    "README.md": "CREATE TABLE orders (id int, customer text); CREATE TABLE invoices (tenant_id int);",
    "tenants.md": "CREATE TABLE invoices (tenant_id int); CREATE TABLE tenants (id int); INSERT INTO tenants VALUES (42), (43);"
    "CREATE TABLE months (closed bool); INSERT INTO months VALUES (false);",
    "fastapi.md": "CREATE TABLE orders (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, customer text);",
    "transactions.md": "CREATE TABLE seen (id int); CREATE TABLE orders (id int, status text);"
    "CREATE TABLE letters (job_id uuid, sent bool);",
}


async def every_page(page: PageRun) -> None:
    """A connection in autocommit, an order."""
    conn = await psycopg.AsyncConnection.connect(page.database.dsn("worker"), autocommit=True)
    page.opened.push_async_callback(conn.close)
    page.names["conn"] = conn
    page.names["order"] = page.names["Order"](customer="Ada", day=date(2026, 1, 31), cents=[1200, 350])


async def web(page: PageRun) -> None:
    """An application, what tells whose a request is, and a table for the object mapper."""

    class Base(DeclarativeBase):
        pass

    class OrderRow(Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)
        customer: Mapped[str]

    async def current_tenant() -> str:
        return "42"

    page.names |= {"web": FastAPI(), "OrderRow": OrderRow, "current_tenant": current_tenant}


async def no_roles(page: PageRun) -> None:
    """The page makes them."""
    for role in MADE:
        await page.sql(f"DROP ROLE IF EXISTS {role}")


async def tenants(page: PageRun) -> None:
    """A task of the page's first line, and where a tenant is."""

    async def make_statement(month: str) -> str:
        return month

    page.names |= {"region_of": lambda tenant: "north", "make_statement": page.names["app"].task(make_statement)}


BEFORE: dict[str, Step] = {"tenants.md": tenants, "api.md": web, "fastapi.md": web, "operations.md": no_roles}


async def it_has_printed_the_sums(page: PageRun) -> None:
    assert page.said["main.py"].split() == ["1550", "1550"]


async def an_order_is_placed(page: PageRun) -> None:
    """The request's row and its job are committed before its response, and the job is found by its id."""
    await page.open_apps()
    names = page.names
    transport = httpx.ASGITransport(names["web"])
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as http, names["app"].worker():
        answer = await http.post("/orders", json=names["order"].model_dump(mode="json"))
        assert answer.status_code == 202, answer.text
        assert await names["app"].job(answer.json()["job"], tenant="42").result(timeout=PATIENCE) == 1550
        seen = await http.get(f"/jobs/{answer.json()['job']}")
        assert seen.json()["result"] == 1550
    await names["sessions"].kw["bind"].dispose()


async def progress_is_followed(page: PageRun) -> None:
    await page.open_apps()
    async with page.names["app"].worker():
        await page.names["follow"]()


async def jobs_end_as_the_page_says(page: PageRun) -> None:
    names = page.names
    async with names["app"].worker():
        assert await names["job"].result(timeout=PATIENCE) == "sales, after 2 looks"
        assert await names["letter"].result(timeout=PATIENCE) == "sent to ada@example.org"


async def a_label_is_printed(page: PageRun) -> None:
    await page.open_apps()
    await page.names["label"]("printer-7", "42")


async def month_is_closed(page: PageRun) -> None:
    await page.finished(page.names["close_month"])
    async with await psycopg.AsyncConnection.connect(page.database.dsn("owner")) as conn:
        cursor = await conn.execute("SELECT closed FROM months")
        assert await cursor.fetchall() == [(True,)]


AFTER: dict[str, Step] = {
    "api.md": progress_is_followed,
    "fastapi.md": an_order_is_placed,
    "README.md": it_has_printed_the_sums,
    "fairness.md": a_label_is_printed,
    "retries.md": jobs_end_as_the_page_says,
    "tenants.md": month_is_closed,
}
