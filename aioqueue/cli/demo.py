"""`python -m aioqueue demo`: runs the demo, shows or prints its report, and exits 1 where a figure is wrong."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import click

from aioqueue import embedded
from aioqueue.demo.data import LARGEST
from aioqueue.demo.processes import WorkersFailed
from aioqueue.demo.report import Report
from aioqueue.demo.run import Demo
from aioqueue.demo.screen import Screen, make_screen, show_report
from aioqueue.errors import AioQueueError

from .options import option


@click.command()
@option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the embedded PostgreSQL; default: .aioqueue here (as root, one of the system's).",
)
@option("--keep", is_flag=True, help="Leave the tables in schema demo, to look around.")
@option(
    "--json",
    "as_json",
    envvar="AIOQUEUE_DEMO_JSON",
    is_flag=True,
    help="Print one JSON object, with every figure, instead of text.",
)
@option(
    "--invoices",
    type=click.IntRange(100, 1_000_000),
    default=LARGEST,
    show_default=True,
    metavar="N",
    help="Invoices of tenant 1; tenant t has floor(N / t).",
)
def demo(*, data_dir: Path | None, keep: bool, as_json: bool, invoices: int) -> None:
    """Run the main job on real input, and check every figure.

    Starts an embedded PostgreSQL and three workers, makes 100 tenants with 103,707 invoices under row-level security, has jobs
    compute each tenant's statement, a job fail, a job kill its workers, and shows what was held meanwhile. Exits 1 if a
    figure is wrong. Needs the extra 'embedded'. Takes less than a minute, leaves nothing behind but the data directory.
    """
    screen = make_screen(quiet=as_json)
    try:
        report = asyncio.run(Demo(screen, data_dir=data_dir, keep=keep, largest=invoices).run())
    except* (AioQueueError, WorkersFailed) as errors:
        raise click.ClickException("\n".join(map(str, _leaves(errors)))) from None
    except* asyncio.CancelledError:
        raise click.Abort from None
    if as_json:
        click.echo(json.dumps(report.as_json(), indent=2))
    else:
        show_report(screen, report)
        _say_how_to_look(screen, report, keep=keep)
    sys.exit(0 if report.ok else 1)


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _say_how_to_look(screen: Screen, report: Report, *, keep: bool) -> None:
    if keep:
        screen.line(f"The tables are kept in schema demo of the embedded database in {report.data_dir}.")
    if Path(report.data_dir) == embedded.default_data_dir():
        screen.line(f"Its jobs, one by one: {_command()} job list, and job show ID.")


def _command() -> str:
    """Return how this command line was started, as it can be typed here."""
    python = Path(sys.executable)
    here = Path.cwd()
    return f"{python.relative_to(here) if python.is_relative_to(here) else python} -m aioqueue"
