-- tenant_default: where the tenant setting has a value before anybody sets it. Changes nothing. Reads pg_db_role_setting, of this
-- database and of all; `role` or `database` NULL: of every one. A last row without either: what this new session has by none of
-- them (postgresql.conf, PGOPTIONS, the DSN's options). No row: a session begins without a tenant.
WITH stored AS (
    SELECT r.rolname, d.datname, substr(o, strpos(o, '=') + 1) AS value
      FROM pg_catalog.pg_db_role_setting s
      LEFT JOIN pg_catalog.pg_roles r ON r.oid = s.setrole
      LEFT JOIN pg_catalog.pg_database d ON d.oid = s.setdatabase
     CROSS JOIN unnest(s.setconfig) o
     WHERE (s.setdatabase = 0 OR d.datname = current_database()) AND lower(split_part(o, '=', 1)) = lower(%(setting)s::text)
)
SELECT pg_catalog.quote_ident(s.rolname) AS role, pg_catalog.quote_ident(s.datname) AS database, s.value, true AS stored
  FROM stored s WHERE s.value <> ''
UNION ALL
SELECT NULL, NULL, m.value, false
  FROM (SELECT pg_catalog.current_setting(%(setting)s::text, true) AS value) m
 WHERE m.value <> '' AND NOT EXISTS (SELECT FROM stored s WHERE s.value = m.value AND (s.rolname IS NULL OR s.rolname = session_user))
 ORDER BY 1, 2
