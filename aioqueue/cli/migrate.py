"""The command `migrate`: brings the schema up to date, says where it is, prints the SQL, grants roles their rights."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import click

from aioqueue import migrate as migrations
from aioqueue.migrate import SchemaStatus
from aioqueue.rights import Kind, holders
from aioqueue.sql import quote_schema

from .failure import UNHEALTHY, Common, Misuse
from .loading import load_app
from .options import Place, as_json, common_options, find_schema, given_dsn, option, reach
from .output import print_json, say

EMBEDDED_ROLES: dict[str, Kind] = {"aioqueue_worker": "worker", "aioqueue_client": "client"}


@click.command
@common_options
@option("--status", is_flag=True, help="Say where the schema is, change nothing; exit code 3 when it does not fit.")
@option("--sql", is_flag=True, help="Print the SQL instead of running it; without a DSN, all of it.")
@option("--grants", metavar="ROLE", help="Grant this role its rights, and do not migrate.")
@option(
    "--as",
    "kind",
    envvar="AIOQUEUE_MIGRATE_AS",
    type=click.Choice(["worker", "client"]),
    default="worker",
    show_default=True,
    help="Which rights.",
)
@option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=migrations.MIGRATE_SECONDS,
    show_default=True,
    metavar="SECONDS",
    help="Time for all of it.",
)
@as_json
@click.pass_context
def migrate(ctx: click.Context, status: bool, sql: bool, grants: str | None, kind: Kind, timeout: float, json: bool) -> None:
    """Bring the schema up to this version, in one transaction, as the role of the DSN: it will own the schema.

    Safe to run from many places at once. Nothing else runs DDL, unless told: worker --migrate, AioQueue(auto_migrate=True),
    and the embedded server.
    """
    common = ctx.ensure_object(Common)
    if status and (sql or grants is not None):
        raise Misuse("--status goes without --sql and --grants")
    if json and not status:
        raise Misuse("--json goes with --status")
    if sql:
        click.echo(_sql(common, grants, kind))
        return
    with reach(common, role="owner") as place:
        if status:
            found = asyncio.run(_status(place))
            _print_status(found, json)
            ctx.exit(0 if found.fits else UNHEALTHY)
        elif grants is not None:
            asyncio.run(_grant(place, grants, kind))
            say(f"role {grants} has the rights of a {kind} in schema {place.schema}")
        else:
            asyncio.run(_migrate(place, timeout))


def _sql(common: Common, role: str | None, kind: Kind) -> str:
    app = None if common.app is None else load_app(common.app)
    schema = find_schema(common, app)
    if role is not None:
        return migrations.grants(role=role, schema=schema, kind=kind)
    if given_dsn(common, app) is None:
        # No server is named: none is started only to print SQL.
        return migrations.script(schema=schema)
    with reach(common, role="owner") as place:
        return asyncio.run(_script(place))


async def _script(place: Place) -> str:
    async with migrations.connect(place.dsn) as conn:
        status = await migrations.status(conn, schema=place.schema)
        roles = await holders(conn, schema=place.schema)
    nothing = f"-- schema {quote_schema(place.schema)} is at version {status.version}: nothing to do"
    return migrations.script(schema=place.schema, since=status.version, roles=roles) or nothing


async def _status(place: Place) -> SchemaStatus:
    async with migrations.connect(place.dsn) as conn:
        return await migrations.status(conn, schema=place.schema)


def _print_status(status: SchemaStatus, as_json: bool) -> None:
    if as_json:
        print_json({**asdict(status), "fits": status.fits})
        return
    there = f"version {status.version}" if status.version else "not there"
    say(f"schema {status.schema}: {there}; this code needs version {status.needed}")
    say(f"pending: {', '.join(status.pending)}" if status.pending else "nothing is pending")
    if status.serves > status.needed:
        say(f"the schema serves code from version {status.serves} on: install a newer aioqueue-pg")


async def _grant(place: Place, role: str, kind: Kind) -> None:
    async with migrations.connect(place.dsn) as conn:
        await migrations.check(conn, schema=place.schema)
    await migrations.grant(place.dsn, role=role, schema=place.schema, kind=kind)


async def _migrate(place: Place, timeout: float) -> None:
    before = await migrations.migrate(place.dsn, schema=place.schema, timeout=timeout)
    if place.embedded and before.pending:
        for role, kind in EMBEDDED_ROLES.items():
            await migrations.grant(place.dsn, role=role, schema=place.schema, kind=kind)
    if before.pending:
        say(f"schema {place.schema}: version {before.version} → {before.needed} ({', '.join(before.pending)})")
    else:
        say(f"schema {place.schema}: nothing to do, it is at version {before.version}")
