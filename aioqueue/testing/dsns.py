"""DSNs of the test's databases, made from one: of another database, or of another role. Connects to nothing."""

from __future__ import annotations

from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from psycopg.conninfo import conninfo_to_dict, make_conninfo


def with_database(dsn: str, name: str) -> str:
    """Return the DSN of another database of the same server, in the form of the one given."""
    if "://" not in dsn:
        return make_conninfo(dsn, dbname=name)
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(path=f"/{quote(name, safe='')}"))


def of_login(dsn: str, role: str) -> str:
    """Return the DSN of another role that logs in, without a password."""
    if "://" not in dsn:
        return make_conninfo(dsn, user=role)
    parts = urlsplit(dsn)
    return urlunsplit(parts._replace(netloc=f"{quote(role, safe='')}@{parts.netloc.rpartition('@')[2]}"))


def as_role(dsn: str, role: str) -> str:
    """Return the DSN with which the same login works as another role from its start (SET ROLE), which it must be a member of."""
    escaped = "".join(f"\\{sign}" if sign in " \\" else sign for sign in role)
    if "://" not in dsn:
        before = conninfo_to_dict(dsn).get("options")
        return make_conninfo(dsn, options=_joined(str(before or ""), escaped))
    parts = urlsplit(dsn)
    query = dict(parse_qsl(parts.query))
    query["options"] = _joined(query.get("options", ""), escaped)
    return urlunsplit(parts._replace(query=urlencode(query, quote_via=quote)))


def _joined(options: str, role: str) -> str:
    return f"{options} -c role={role}".strip()
