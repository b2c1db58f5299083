-- tenant_policies: every policy that reads the tenant setting, itself or by a function that it calls, and its table.
-- Changes nothing. One pass over pg_policy; functions by pg_depend's index. Our own tables are left out (queue_policies.sql).
-- No row: no policy goes by this setting.
WITH policy AS MATERIALIZED (
    SELECT p.oid, p.polrelid,
           lower(concat(pg_catalog.pg_get_expr(p.polqual, p.polrelid), ' ', pg_catalog.pg_get_expr(p.polwithcheck, p.polrelid))) AS says
      FROM pg_catalog.pg_policy p
      JOIN pg_catalog.pg_class c ON c.oid = p.polrelid
      JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname <> %(schema)s::name OR NOT c.relname = ANY (%(own)s::name[])
), called AS MATERIALIZED (
    SELECT d.objid AS policy, lower(coalesce(pg_catalog.pg_get_function_sqlbody(f.oid), f.prosrc)) AS says
      FROM pg_catalog.pg_depend d
      JOIN pg_catalog.pg_proc f ON f.oid = d.refobjid
     WHERE d.classid = 'pg_catalog.pg_policy'::regclass AND d.refclassid = 'pg_catalog.pg_proc'::regclass
)
SELECT p.oid::bigint AS policy, p.polrelid::bigint AS "table"
  FROM policy p WHERE strpos(p.says, lower(pg_catalog.quote_literal(%(setting)s::text))) > 0
UNION
SELECT p.oid::bigint, p.polrelid::bigint
  FROM policy p JOIN called f ON f.policy = p.oid WHERE strpos(f.says, lower(pg_catalog.quote_literal(%(setting)s::text))) > 0
 ORDER BY 2, 1
