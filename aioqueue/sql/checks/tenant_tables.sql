-- tenant_tables: of each tenant table and role: whether row-level security is on, whether the role is free of it as the table's
-- owner (or a member of the owner), and by whose right it may TRUNCATE, which no policy stops. Changes nothing.
-- Reads pg_class by oid; a row for each table and role where one of these is wrong. Superusers are left out: see bypass.sql.
SELECT pg_catalog.format('%%I.%%I', n.nspname, c.relname) AS "table", o.rolname::text AS owner, r.rolname::text AS role, c.relrowsecurity AS enabled,
       f.free, t.truncates
  FROM pg_catalog.pg_class c
  JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_catalog.pg_roles o ON o.oid = c.relowner
 CROSS JOIN pg_catalog.pg_roles r
 CROSS JOIN LATERAL (SELECT NOT c.relforcerowsecurity AND pg_catalog.pg_has_role(r.oid, c.relowner, 'MEMBER') AS free) f
 CROSS JOIN LATERAL (
       SELECT array_agg(DISTINCT coalesce(pg_catalog.quote_ident(g.rolname), 'PUBLIC')) AS truncates
         FROM pg_catalog.aclexplode(coalesce(c.relacl, pg_catalog.acldefault('r', c.relowner))) a
         LEFT JOIN pg_catalog.pg_roles g ON g.oid = a.grantee
        WHERE a.privilege_type = 'TRUNCATE' AND (a.grantee = 0 OR pg_catalog.pg_has_role(r.oid, a.grantee, 'USAGE'))) t
 WHERE c.oid = ANY (%(tables)s::oid[]) AND r.rolname = ANY (%(roles)s::name[]) AND NOT r.rolsuper
   AND (NOT c.relrowsecurity OR f.free OR t.truncates IS NOT NULL)
 ORDER BY 1, 3
