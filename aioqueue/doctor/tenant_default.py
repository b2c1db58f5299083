"""A value of the tenant setting that nobody has set for the transaction at hand."""

from __future__ import annotations

from aioqueue.finding import Finding, Kind, Severity

from .examination import Examination, quoted

DEFAULT = Kind(
    "tenant-default",
    Severity.ERROR,
    "a session that sets no tenant must see no tenant's rows; with a default it sees that tenant's",
)


async def look(examination: Examination) -> list[Finding]:
    """Find defaults of the tenant setting."""
    setting = examination.setting
    found = []
    rows = await examination.rows("tenant_default")
    for row in rows:
        role, database = row["role"], row["database"]
        if not row["stored"]:
            what = f"a new session has {setting} = {row['value']!r}, which no ALTER ROLE or ALTER DATABASE has set"
            found.append(DEFAULT.found(what, fix=f"take {setting} out of postgresql.conf, PGOPTIONS or the DSN's options"))
            continue
        if role is None and database is not None:
            whose, fix = f"of database {database}", f"ALTER DATABASE {database} RESET {setting};"
        else:
            within = "" if database is None else f" IN DATABASE {database}"
            whose = "of every role" if role is None else f"of role {role}" + (f" in database {database}" if database else "")
            fix = f"ALTER ROLE {role or 'ALL'}{within} RESET {setting};"
        found.append(DEFAULT.found(f"the sessions {whose} begin with {setting} = {row['value']!r}", fix=fix))
    engine = examination.engine
    if engine is not None and engine.tenant:
        known = [row["value"] for row in rows if row["role"] in (None, quoted(engine.role), engine.role)]
        if engine.tenant not in known:
            what = (
                f"a new session of session='s engine has {setting} = {engine.tenant!r}, which no ALTER ROLE or DATABASE has set"
            )
            found.append(DEFAULT.found(what, fix=f"take {setting} out of the engine's connect_args or its URL's options"))
    return found
