"""Where the database is: given, then the environment in a fixed order, then nothing."""

import pytest

from aioqueue import ConfigurationError
from aioqueue.dsn import find_dsn, find_listen_dsn, no_dsn

GIVEN = "postgresql://given/db"
OURS = "postgresql://ours/db"
COMMON = "postgresql://common/db"


@pytest.mark.parametrize(
    ("given", "environ", "found"),
    [
        (GIVEN, {"AIOQUEUE_DSN": OURS, "DATABASE_URL": COMMON, "PGHOST": "h"}, GIVEN),
        (None, {"AIOQUEUE_DSN": OURS, "DATABASE_URL": COMMON, "PGHOST": "h"}, OURS),
        (None, {"DATABASE_URL": COMMON, "PGHOST": "h"}, COMMON),
        (None, {"AIOQUEUE_DSN": "", "DATABASE_URL": COMMON}, COMMON),
        ("", {"AIOQUEUE_DSN": OURS}, OURS),
        (None, {"PGHOST": "h"}, ""),
        (None, {"PGSERVICE": "s"}, ""),
        (None, {"PGDATABASE": ""}, None),
        (None, {}, None),
        (None, {"HOME": "/"}, None),
        ("host=h dbname=d", {}, "host=h dbname=d"),
    ],
)
def test_the_first_place_that_names_one_wins(given: str | None, environ: dict[str, str], found: str | None) -> None:
    assert find_dsn(given, environ) == found


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "psycopg2", "psycopg_async"])
def test_a_driver_in_the_scheme_is_left_out(scheme: str, driver: str) -> None:
    assert find_dsn(f"{scheme}+{driver}://u:p+x://@h/d") == f"{scheme}://u:p+x://@h/d"


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOQUEUE_DSN", OURS)
    assert find_dsn() == OURS


def test_the_error_for_no_database_names_every_way_to_give_one() -> None:
    error = no_dsn()
    assert isinstance(error, ConfigurationError)
    for way in ("AioQueue('postgresql://", "--dsn", "AIOQUEUE_DSN", "DATABASE_URL", "PGHOST", "embedded", "aioqueue-pg"):
        assert way in str(error)


def test_wake_ups_have_a_dsn_of_their_own_if_one_is_given() -> None:
    environ = {"AIOQUEUE_DSN": OURS, "AIOQUEUE_LISTEN_DSN": COMMON}
    assert find_listen_dsn("postgresql+asyncpg://given/db", environ) == GIVEN
    assert find_listen_dsn(None, environ) == COMMON
    assert find_listen_dsn(None, {"AIOQUEUE_DSN": OURS}) is None
