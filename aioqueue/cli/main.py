"""Puts the commands together; the entry of `python -m aioqueue` and of the script `aioqueue`."""

from __future__ import annotations

import platform

import click
import psycopg

from aioqueue import migrate as migrations
from aioqueue.version import VERSION

from .demo import demo
from .dev import dev
from .doctor import doctor
from .enqueue import enqueue
from .failure import Commands
from .health import health
from .job import job
from .migrate import migrate
from .options import as_json, common_options
from .output import print_json
from .queue import queue
from .status import status
from .tenant import tenant
from .worker import worker


@click.group(cls=Commands, context_settings={"auto_envvar_prefix": "AIOQUEUE", "max_content_width": 100})
@common_options
def cli() -> None:
    """A job queue on PostgreSQL.

    -A, --dsn, --schema and -v stand before or after the command. The database is that of --dsn, else of the app (-A), else of
    AIOQUEUE_DSN, DATABASE_URL or PG*, else the embedded server's in .aioqueue. Every option can be set by the environment
    variable that its help names. Exit codes: 0 done, 1 failed, 2 wrongly called, 3 unhealthy or the schema does not fit.
    """


@click.command
@as_json
def version(json: bool) -> None:
    """Show the versions of aioqueue, of the schema that it needs, and of what it stands on."""
    found = {
        "aioqueue": VERSION,
        "schema": migrations.code_version(),
        "python": platform.python_version(),
        "psycopg": psycopg.__version__,
        "libpq": psycopg.pq.version_pretty(psycopg.pq.version()),
    }
    if json:
        print_json(found)
        return
    for name, value in found.items():
        click.echo(f"{name} {value}")


for command in (worker, dev, migrate, status, health, doctor, job, tenant, queue, enqueue, demo, version):
    cli.add_command(command)
