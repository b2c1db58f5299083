"""Where the database is: given, then the environment in a fixed order, then nothing."""

import traceback
from collections.abc import Callable

import pytest

from aioqueue import AioQueue, ConfigurationError
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
    assert find_dsn(f"{scheme}+{driver}://u:p+x:%2F%2F@h/d") == f"{scheme}://u:p+x:%2F%2F@h/d"


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


@pytest.mark.parametrize(
    ("dsn", "said"),
    [
        ("mysql://u:s3cret@h/x", "got one of mysql://"),
        ("postgresql://u:s3cret@h:port/x", "its port is no number"),
        ("postgresql://u:s3cret@h:99999/x", "its port is no number"),
        ("host=h password=s3cret port=x", "its port is no number"),
        ("postgresql://u:s3%cret@h/x", "PostgreSQL cannot read"),
        ("s3cret", "PostgreSQL cannot read"),
        ("nonsense=s3cret", "PostgreSQL cannot read"),
    ],
)
def test_what_is_no_dsn_is_refused_by_its_place_without_its_password(dsn: str, said: str) -> None:
    ways: list[tuple[str, Callable[[], object]]] = [
        ("dsn", lambda: AioQueue(dsn)),
        ("listen_dsn", lambda: AioQueue(GIVEN, listen_dsn=dsn)),
        ("--dsn", lambda: find_dsn(dsn, {})),
        ("AIOQUEUE_DSN", lambda: find_dsn(None, {"AIOQUEUE_DSN": dsn})),
        ("DATABASE_URL", lambda: find_dsn(None, {"DATABASE_URL": dsn})),
        ("AIOQUEUE_LISTEN_DSN", lambda: find_listen_dsn(None, {"AIOQUEUE_LISTEN_DSN": dsn})),
    ]
    for place, find in ways:
        with pytest.raises(ConfigurationError, match="expected one such as postgresql://user@host/db") as caught:
            find()
        assert place in str(caught.value) and said in str(caught.value)
        assert "cret" not in "".join(traceback.format_exception(caught.value))


def test_several_hosts_with_ports_pass() -> None:
    several = "postgresql://a:1,b:5433,c/x"
    assert find_dsn(several, {}) == several
