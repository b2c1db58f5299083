-- connections: of each role, the connections that its living workers take at most, and those that its sessions have now, here and
-- on the whole server; beside them the limits, which a row at least has. -1: no limit. A worker that does not say what it takes
-- counts as `usual`. Changes nothing. Reads the worker's rows, and pg_stat_activity, which shows every session's role to everybody.
WITH worker AS (
    SELECT coalesce(w.role, current_user::text) AS role, count(*)::integer AS workers, sum(coalesce(w.connections, %(usual)s::integer))::integer AS need
      FROM aioqueue.worker w WHERE NOT w.dead AND w.lease_until > clock_timestamp()
     GROUP BY 1
), session AS (
    SELECT a.usename::text AS role, count(*)::integer AS everywhere, (count(*) FILTER (WHERE a.datname = current_database()))::integer AS here
      FROM pg_catalog.pg_stat_activity a
     WHERE a.usename IS NOT NULL AND a.datid IS NOT NULL AND coalesce(a.backend_type, 'client backend') = 'client backend'
       AND a.pid <> pg_backend_pid()
     GROUP BY 1
)
SELECT coalesce(w.role, s.role) AS role, coalesce(w.workers, 0) AS workers, coalesce(w.need, 0) AS need,
       coalesce(s.everywhere, 0) AS everywhere, coalesce(s.here, 0) AS here, r.rolconnlimit AS role_limit,
       pg_catalog.quote_ident(r.rolname) AS quoted_role, d.datconnlimit AS database_limit, pg_catalog.quote_ident(d.datname) AS database,
       m.connections, m.reserved
  FROM (SELECT current_setting('max_connections')::integer AS connections,
               current_setting('superuser_reserved_connections')::integer
               + coalesce(current_setting('reserved_connections', true), '0')::integer AS reserved) m
  JOIN pg_catalog.pg_database d ON d.datname = current_database()
  LEFT JOIN (worker w FULL JOIN session s ON s.role = w.role) ON true
  LEFT JOIN pg_catalog.pg_roles r ON r.rolname = coalesce(w.role, s.role)
 ORDER BY 1
