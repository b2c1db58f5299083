-- tenant_policies: every policy that reads the tenant setting, itself or by a function that it calls, and its table.
-- Changes nothing. One pass over pg_policy; functions by pg_depend's index. Our own tables are left out (queue_policies.sql).
-- No row: no policy goes by this setting.
WITH policy AS (
    SELECT p.oid, p.polrelid,
           lower(concat(pg_catalog.pg_get_expr(p.polqual, p.polrelid), ' ', pg_catalog.pg_get_expr(p.polwithcheck, p.polrelid))) AS says,
           lower(pg_catalog.quote_literal(%(setting)s::text)) AS name
      FROM pg_catalog.pg_policy p
      JOIN pg_catalog.pg_class c ON c.oid = p.polrelid
      JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname <> %(schema)s::name OR NOT c.relname = ANY (%(own)s::name[])
)
SELECT p.oid::bigint AS policy, p.polrelid::bigint AS "table"
  FROM policy p
 WHERE strpos(p.says, p.name) > 0
    OR EXISTS (SELECT FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_proc f ON f.oid = d.refobjid
                WHERE d.classid = 'pg_catalog.pg_policy'::regclass AND d.objid = p.oid AND d.refclassid = 'pg_catalog.pg_proc'::regclass
                  AND strpos(lower(coalesce(pg_catalog.pg_get_function_sqlbody(f.oid), f.prosrc)), p.name) > 0)
 ORDER BY 2, 1
